// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "yoke/comm/local/group.h"
#include "yoke/comm/shm/rank.h"

namespace yoke::comm {
namespace {

constexpr uint64_t kWorthSharing = 64 << 10;  // bytes; less is done by one rank

}  // namespace

ShmGroup::ShmGroup(ShmRank& owner, std::string name, std::vector<int> members, int rank,
                   Board board)
    : owner_(owner),
      name_(std::move(name)),
      members_(std::move(members)),
      rank_(rank),
      id_(owner.world().next_group_id()),
      board_(board) {
  owner_.world().flights().name_group(id_, name_);
}

ShmGroup::~ShmGroup() {
  for (const auto& pending : collectives_) settle(*pending);
  for (auto* channels : {&sends_, &recvs_})
    for (auto& [peer, channel] : *channels)
      for (const auto& pending : channel.pending) settle(*pending);
  board_.users().fetch_sub(1);
}

void ShmGroup::call_off(Kind kind, const std::string& what) {
  owner_.world().fail(owner_.rank(), kind, what);
  owner_.world().raise(owner_.rank());
}

void ShmGroup::ring_all() const {
  for (const int member : members_)
    if (member != owner_.rank()) owner_.bell(member).notify_all();
}

std::string ShmGroup::text(const ShmPending& pending) const {
  std::string words = cat(to_string(pending.kind), " #", pending.sequence);
  if (pending.message())
    words +=
        cat(pending.kind == OpKind::Send ? " to rank " : " from rank ", world_rank(pending.peer));
  return cat(words, " on ", name_);
}

std::vector<int> ShmGroup::missing_in(const ShmPending& pending) const {
  std::vector<int> missing;
  const uint64_t number = pending.sequence + 1;
  if (pending.message()) {
    const bool came =
        pending.kind == OpKind::Send
            ? board_.message(rank_, pending.peer, pending.sequence).taken.load() >= number
            : board_.message(pending.peer, rank_, pending.sequence).sent.load() >= number;
    if (!came) missing.push_back(world_rank(pending.peer));
    return missing;
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && board_.part(pending.sequence, r).came.load() < number)
      missing.push_back(world_rank(r));
  return missing;
}

std::shared_ptr<ShmPending> ShmGroup::post(Operation part) {
  World& world = owner_.world();
  world.check(owner_.rank());
  if (world.options().before_issue) world.options().before_issue(owner_.rank(), part.kind);
  auto pending = std::make_shared<ShmPending>();
  pending->kind = part.kind;
  if (part.point_to_point()) {
    pending->peer = part.root;
    Channel& channel = (part.kind == OpKind::Send ? sends_ : recvs_)[part.root];
    pending->sequence = channel.posted++;
    channel.pending.push_back(pending);
    ++num_messages_;
  } else {
    pending->sequence = posted_++;
    collectives_.push_back(pending);
  }
  pending->ticket = world.flights().post(owner_.rank(), {.kind = to_string(part.kind),
                                                         .group = id_,
                                                         .sequence = pending->sequence,
                                                         .bytes = part.bytes(),
                                                         .peer = part.root,
                                                         .message = pending->message()});
  pending->part = std::move(part);
  progress(/*steal=*/false);
  return pending;
}

bool ShmGroup::progress(bool steal) {
  bool moved = false;
  if (!collectives_.empty()) {
    moved |= publish();
    moved |= help(steal);
    moved |= retire();
  }
  if (num_messages_ > 0) {
    for (auto& [peer, channel] : sends_)
      if (!channel.pending.empty()) moved |= publish_sends(peer, channel);
    for (auto& [peer, channel] : recvs_)
      if (!channel.pending.empty()) moved |= take_messages(peer, channel);
  }
  return moved;
}

// Finds places for private tensors in shared memory, one for each, and fills those of the inputs.
void ShmGroup::stage(ShmPending& pending) {
  run_copies(pending.part.before);
  auto find = [&](const at::Tensor& tensor) -> ShmPending::Stage* {
    if (tensor.nbytes() == 0) return nullptr;
    if (owner_.memory().locate(tensor.const_data_ptr(), tensor.nbytes())) return nullptr;
    for (auto& staged : pending.stages)
      if (staged.tensor.const_data_ptr() == tensor.const_data_ptr() &&
          staged.tensor.nbytes() == tensor.nbytes())
        return &staged;
    void* place = owner_.memory().allocate(tensor.nbytes());
    pending.stages.push_back({tensor, place, false, false});
    return &pending.stages.back();
  };
  for (const auto& tensor : pending.part.inputs)
    if (auto* staged = find(tensor)) staged->in = true;
  for (const auto& tensor : pending.part.outputs)
    if (auto* staged = find(tensor)) staged->out = true;
  for (const auto& staged : pending.stages)
    if (staged.in)
      std::memcpy(staged.place, staged.tensor.const_data_ptr(), staged.tensor.nbytes());
}

std::vector<Location> ShmGroup::places_of(const ShmPending& pending) const {
  std::vector<Location> places;
  for (const auto* list : {&pending.part.inputs, &pending.part.outputs})
    for (const auto& tensor : *list) {
      const void* at = tensor.nbytes() == 0 ? nullptr : tensor.const_data_ptr();
      for (const auto& staged : pending.stages)
        if (staged.tensor.const_data_ptr() == at && staged.tensor.nbytes() == tensor.nbytes())
          at = staged.place;
      const auto place = at == nullptr ? std::nullopt : owner_.memory().locate(at, tensor.nbytes());
      places.push_back(place.value_or(Location{}));
    }
  return places;
}

void ShmGroup::settle(ShmPending& pending) {
  for (const auto& staged : pending.stages) owner_.memory().free(staged.place);
  pending.stages.clear();
  pending.part = Operation{.kind = pending.kind};
}

// Collectives.

// Shows the others what this rank has called, as far as slots are free. A private tensor is copied
// only when all that was called before has taken effect.
bool ShmGroup::publish() {
  bool moved = false;
  for (size_t i = 0; i < collectives_.size(); ++i) {
    ShmPending& pending = *collectives_[i];
    if (pending.published) continue;
    const uint64_t s = pending.sequence;
    if (board_.slot(s).retired.load(std::memory_order_acquire) !=
        uint64_t(size()) * (s / Board::kSlots))
      break;
    const auto is_private = [&](const at::Tensor& tensor) {
      return tensor.nbytes() > 0 &&
             !owner_.memory().locate(tensor.const_data_ptr(), tensor.nbytes());
    };
    const Operation& part = pending.part;
    const bool copies = !part.before.empty() || std::ranges::any_of(part.inputs, is_private) ||
                        std::ranges::any_of(part.outputs, is_private);
    if (copies && i > 0) break;
    if (copies) stage(pending);
    Board::Part& mine = board_.part(s, rank_);
    write(mine, part, places_of(pending));
    mine.came.store(s + 1);
    if (const auto conflict = conflict_in(s, part); !conflict.empty())
      call_off(Kind::Comm, conflict);
    pending.published = moved = true;
    board_.slot(s).arrived.fetch_add(1, std::memory_order_acq_rel);
    // Those who wait can read the calls while this rank starts the operation.
    if (board_.complete(s) && part.bytes() > kWorthSharing) ring_all();
  }
  return moved;
}

// Of two ranks that come at once, at least one sees the other's call: both write before they read.
std::string ShmGroup::conflict_in(uint64_t sequence, const Operation& mine) {
  for (int other = 0; other < size(); ++other) {
    Board::Part& theirs = board_.part(sequence, other);
    if (other == rank_ || theirs.came.load() != sequence + 1) continue;
    const Operation part = read(theirs, nullptr);
    if (const auto reason = mismatch(part, other, mine, rank_))
      return disagreement(*reason, {owner_.rank(), mine.text()}, {world_rank(other), part.text()},
                          sequence, name_);
  }
  return "";
}

const CpuItems& ShmGroup::items_of(uint64_t sequence) {
  if (items_of_ != sequence + 1) {
    std::vector<Operation> parts;
    for (int r = 0; r < size(); ++r)
      parts.push_back(read(board_.part(sequence, r), &owner_.memory()));
    items_ = CpuItems(jobs_of(parts), parts[0]);
    items_of_ = sequence + 1;
  }
  return items_;
}

bool ShmGroup::help(bool steal) {
  const uint64_t s = board_.completed().load(std::memory_order_acquire);
  if (collectives_.front()->sequence > s || !board_.complete(s)) return false;
  Board::Slot& slot = board_.slot(s);
  uint64_t stage = slot.stage.load(std::memory_order_acquire);
  if (stage < Board::at_stage(s, Board::Starting)) {
    if (!slot.stage.compare_exchange_strong(stage, Board::at_stage(s, Board::Starting)))
      return false;
    if (!start(s)) return true;
  } else if (stage != Board::at_stage(s, Board::Running)) {
    if (stage == Board::at_stage(s, Board::Starting)) items_of(s);
    return false;
  }
  const CpuItems* items = nullptr;
  int64_t ran = 0;
  const int visits = steal ? size() : 1;
  for (int visit = 0; visit < visits; ++visit) {
    Board::Share& share = board_.share(s, (rank_ + visit) % size());
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= share.end) break;
      if (items == nullptr) items = &items_of(s);
      items->run(item);
      ++ran;
    }
  }
  if (ran > 0 && slot.items_left.fetch_sub(ran, std::memory_order_acq_rel) == ran) finish(s);
  return ran > 0;
}

// Divides the work among the ranks; false if there was none.
bool ShmGroup::start(uint64_t s) {
  Board::Slot& slot = board_.slot(s);
  if (board_.part(s, 0).kind == OpKind::Split) form_groups(s);
  const int64_t count = items_of(s).size();
  if (count == 0) {
    finish(s);
    return false;
  }
  for (int r = 0; r < size(); ++r) {
    // A single item is not worth waking anybody.
    const bool alone = count == 1;
    board_.share(s, r).next.store(alone ? 0 : r * count / size(), std::memory_order_relaxed);
    board_.share(s, r).end = alone ? (r == rank_ ? 1 : 0) : (r + 1) * count / size();
  }
  slot.items_left.store(count, std::memory_order_relaxed);
  slot.stage.store(Board::at_stage(s, Board::Running), std::memory_order_release);
  if (count > 1) ring_all();
  return true;
}

void ShmGroup::finish(uint64_t s) {
  board_.slot(s).stage.store(Board::at_stage(s, Board::Done), std::memory_order_release);
  board_.completed().store(s + 1, std::memory_order_release);
  ring_all();
}

bool ShmGroup::retire() {
  bool moved = false;
  while (!collectives_.empty() && collectives_.front()->published &&
         board_.completed().load(std::memory_order_acquire) > collectives_.front()->sequence) {
    const auto pending = collectives_.front();
    const uint64_t s = pending->sequence;
    for (const auto& staged : pending->stages)
      if (staged.out)
        std::memcpy(staged.tensor.mutable_data_ptr(), staged.place, staged.tensor.nbytes());
    run_copies(pending->part.after);
    if (pending->kind == OpKind::Split) {
      pending->formed = board_.part(s, rank_).formed;
      for (int r = 0; r < size(); ++r)
        if (board_.part(s, r).color == board_.part(s, rank_).color) pending->members.push_back(r);
      std::ranges::stable_sort(pending->members, {}, [&](int r) { return board_.part(s, r).key; });
    }
    settle(*pending);
    collectives_.pop_front();
    owner_.world().flights().finish(owner_.rank(), pending->ticket);
    pending->done = moved = true;
    const uint64_t all = uint64_t(size()) * (s / Board::kSlots + 1);
    if (board_.slot(s).retired.fetch_add(1, std::memory_order_acq_rel) + 1 == all) ring_all();
  }
  return moved;
}

void ShmGroup::form_groups(uint64_t s) {
  std::map<int, std::vector<int>> colors;
  for (int r = 0; r < size(); ++r)
    if (board_.part(s, r).color >= 0) colors[board_.part(s, r).color].push_back(r);
  for (const auto& [color, ranks] : colors) {
    const auto n = int(ranks.size());
    void* memory = owner_.memory().allocate(Board::bytes(n));
    std::memset(memory, 0, Board::bytes(n));
    const Board board(memory, n);
    board.users().store(n);
    owner_.keep(board, memory);
    for (const int r : ranks)
      board_.part(s, r).formed = *owner_.memory().locate(memory, Board::bytes(n));
  }
}

// Messages: a send lies where the receiver finds it, and the receiver copies it.

bool ShmGroup::publish_sends(int peer, Channel& channel) {
  bool moved = false;
  while (!channel.pending.empty()) {  // those that have been taken, in order
    const auto pending = channel.pending.front();
    const uint64_t q = pending->sequence;
    if (!pending->published ||
        board_.message(rank_, peer, q).taken.load(std::memory_order_acquire) < q + 1)
      break;
    settle(*pending);
    channel.pending.pop_front();
    --num_messages_;
    owner_.world().flights().finish(owner_.rank(), pending->ticket);
    pending->done = moved = true;
  }
  for (const auto& pending : channel.pending) {
    if (pending->published) continue;
    const uint64_t q = pending->sequence;
    Board::Message& message = board_.message(rank_, peer, q);
    if (q >= Board::kSlots && message.taken.load(std::memory_order_acquire) < q + 1 - Board::kSlots)
      break;
    stage(*pending);
    write(message.part, pending->part, places_of(*pending));
    message.sent.store(q + 1, std::memory_order_release);
    pending->published = moved = true;
    owner_.bell(world_rank(peer)).notify_all();
  }
  return moved;
}

bool ShmGroup::take_messages(int peer, Channel& channel) {
  bool moved = false;
  while (!channel.pending.empty()) {
    const auto pending = channel.pending.front();
    const uint64_t q = pending->sequence;
    Board::Message& message = board_.message(peer, rank_, q);
    if (message.sent.load(std::memory_order_acquire) < q + 1) break;
    const Operation send = read(message.part, &owner_.memory());
    const at::Tensor &from = send.subject(), &to = pending->part.subject();
    if (const auto reason =
            message_mismatch(from.scalar_type(), from.numel(), to.scalar_type(), to.numel()))
      call_off(Kind::Comm, disagreement(*reason, {owner_.rank(), pending->part.text()},
                                        {world_rank(peer), send.text()}, q, name_,
                                        /*message=*/true));
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    run_copies(pending->part.after);
    settle(*pending);
    channel.pending.pop_front();
    --num_messages_;
    message.taken.store(q + 1, std::memory_order_release);
    owner_.world().flights().finish(owner_.rank(), pending->ticket);
    pending->done = moved = true;
    owner_.bell(world_rank(peer)).notify_all();
  }
  return moved;
}

void ShmGroup::drop_what_waits_for_the_departed() {
  const auto hopeless = [&](const std::shared_ptr<ShmPending>& pending) {
    return owner_.world()
        .in_vain(owner_.rank(), "", members_, [&] { return missing_in(*pending); })
        .has_value();
  };
  for (auto* channels : {&sends_, &recvs_})
    for (auto& [peer, channel] : *channels)
      num_messages_ -= std::erase_if(channel.pending, hopeless);
  std::erase_if(collectives_, hopeless);
}

}  // namespace yoke::comm
