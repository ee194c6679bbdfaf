// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/local/group.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace yoke::comm {

void run_copies(const std::vector<Operation::Copy>& copies) {
  if (copies.empty()) return;
  const at::NoGradGuard no_grad;
  for (const auto& [from, to] : copies) to.copy_(from);
}

std::shared_ptr<LocalGroup> LocalGroup::make(std::shared_ptr<World> world, std::string name,
                                             std::vector<int> members) {
  std::shared_ptr<LocalGroup> group(
      new LocalGroup(std::move(world), std::move(name), std::move(members)));
  group->wake_token_ = group->world_->on_change([weak = std::weak_ptr(group)] {
    if (const auto held = weak.lock()) held->changed_.notify_all();
  });
  return group;
}

LocalGroup::LocalGroup(std::shared_ptr<World> world, std::string name, std::vector<int> members)
    : world_(std::move(world)),
      name_(std::move(name)),
      members_(std::move(members)),
      id_(world_->next_group_id()),
      posted_(members_.size()) {
  world_->flights().name_group(id_, name_);
}

LocalGroup::~LocalGroup() {
  watchdog_.request_stop();
  changed_.notify_all();
}

void LocalGroup::call_off(int rank, Kind kind, const std::string& what) {
  world_->fail(world_rank(rank), kind, what);
  world_->raise(world_rank(rank));
}

std::shared_ptr<Pending> LocalGroup::post(int rank, Operation part) {
  world_->check(world_rank(rank));
  if (world_->options().before_issue) world_->options().before_issue(world_rank(rank), part.kind);
  if (part.point_to_point()) return post_message(rank, std::move(part));
  return post_collective(rank, std::move(part));
}

std::shared_ptr<Collective> LocalGroup::post_collective(int rank, Operation part) {
  const auto me = size_t(rank);
  std::shared_ptr<Collective> op;
  std::string conflict;
  bool everybody_came = false;
  const bool on_cuda = part.subject().defined() && part.subject().is_cuda();
  auto mark = on_cuda ? cuda_mark(part.subject().device()) : nullptr;
  {
    MutexLock lock(mutex_);
    collect();
    const uint64_t sequence = posted_[me]++;
    const uint64_t place = sequence - completed_;
    if (place == queue_.size()) {
      op = std::make_shared<Collective>(members_.size());
      op->sequence = sequence;
      op->missing = members_;
      op->kind = part.kind;
      op->on_cuda = on_cuda;
      if (on_cuda) {
        if (!lane_) lane_ = std::make_unique<CudaLane>();
        op->lane = lane_.get();
        op->lane_number = uint32_t(sequence + 1);
        watch(op);
      }
      queue_.push_back(op);
    }
    op = queue_[place];
    op->tickets[me] = world_->flights().post(world_rank(rank), {.kind = to_string(part.kind),
                                                                .group = id_,
                                                                .sequence = sequence,
                                                                .bytes = part.bytes(),
                                                                .peer = part.root});
    for (int other = 0; other < size() && conflict.empty(); ++other) {
      const bool came = !std::ranges::count(op->missing, world_rank(other));
      if (!came) continue;
      if (const auto reason = mismatch(op->parts[size_t(other)], other, part, rank))
        conflict =
            disagreement(*reason, {world_rank(rank), part.text()},
                         {world_rank(other), op->parts[size_t(other)].text()}, sequence, name_);
    }
    if (conflict.empty()) {
      op->parts[me] = std::move(part);
      op->marks[me] = std::move(mark);
      std::erase(op->missing, world_rank(rank));
      everybody_came = op->missing.empty();
      if (place == 0) settle_head();
    }
  }
  if (!conflict.empty()) call_off(rank, Kind::Comm, conflict);
  changed_.notify_all();
  // The own share of what can run now. A CUDA operation is enqueued right here by the last to come,
  // after what stands before it in the queue, all of which everybody has posted too.
  const bool enqueue = op->on_cuda && everybody_came;
  while (help(rank, /*steal=*/enqueue) || (enqueue && !op->done() && !world_->failed())) {
  }
  return op;
}

void LocalGroup::settle_head() {
  if (queue_.empty() || !queue_.front()->missing.empty()) return;
  queue_.front()->stage.store(Pending::Stage::Settled, std::memory_order_release);
  claimable_.store(1, std::memory_order_release);
}

bool LocalGroup::help(int rank, bool steal) {
  using Stage = Pending::Stage;
  if (claimable_.load(std::memory_order_acquire) <= 0) return false;
  std::shared_ptr<Collective> op;
  {
    MutexLock lock(mutex_);
    if (queue_.empty()) return false;
    op = queue_.front();
  }
  if (!op->settled()) return false;
  Stage expected = Stage::Settled;
  if (op->stage.compare_exchange_strong(expected, Stage::Starting)) {
    claimable_.store(0, std::memory_order_relaxed);
    start(rank, *op);
    if (op->items.size() == 0) {
      finish(rank, *op);
      return true;
    }
    op->items_left.store(op->items.size(), std::memory_order_relaxed);
    claimable_.store(int(op->num_shares()), std::memory_order_relaxed);
    op->stage.store(Stage::Running, std::memory_order_release);
    if (op->items.size() > 1) changed_.notify_all();
  }
  if (op->stage.load(std::memory_order_acquire) != Stage::Running) return false;
  int64_t ran = 0;
  const size_t visits = steal ? op->shares.size() : 1;
  for (size_t visit = 0; visit < visits; ++visit) {
    auto& share = op->shares[(size_t(rank) + visit) % op->shares.size()];
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= share.end) break;
      if (item + 1 == share.end) claimable_.fetch_sub(1, std::memory_order_relaxed);
      op->items.run(item);
      ++ran;
    }
  }
  if (ran > 0 && op->items_left.fetch_sub(ran, std::memory_order_acq_rel) == ran) finish(rank, *op);
  return ran > 0;
}

void LocalGroup::start(int rank, Collective& op) {
  carry_out(rank, {&op}, [&] {
    if (op.kind == OpKind::Split) form_groups(op);
    const auto jobs = jobs_of(op.parts);
    if (op.on_cuda) {
      op.launched = op.lane->launch(op.lane_number, op.parts, op.marks, jobs);
      return;
    }
    for (const auto& part : op.parts) run_copies(part.before);
    op.items = CpuItems(jobs, op.parts[0]);
  });
  if (op.items.size() == 1) {  // not worth waking anybody
    op.shares[size_t(rank)].end = 1;
    return;
  }
  const int64_t n = int64_t(op.shares.size());
  for (int64_t r = 0; r < n; ++r) {
    op.shares[size_t(r)].next.store(r * op.items.size() / n, std::memory_order_relaxed);
    op.shares[size_t(r)].end = (r + 1) * op.items.size() / n;
  }
}

void LocalGroup::finish(int rank, Collective& op) {
  if (!op.on_cuda) {
    carry_out(rank, {&op}, [&] {
      for (const auto& part : op.parts) run_copies(part.after);
    });
    op.drop_tensors();
  }
  {
    MutexLock lock(mutex_);
    for (int r = 0; r < size(); ++r) world_->flights().finish(world_rank(r), op.tickets[size_t(r)]);
    const auto keep = std::move(queue_.front());
    queue_.pop_front();
    ++completed_;
    claimable_.store(0, std::memory_order_release);
    settle_head();
    op.stage.store(Pending::Stage::Done, std::memory_order_release);
  }
  changed_.notify_all();
}

void LocalGroup::form_groups(Collective& op) {
  std::map<int, std::vector<std::pair<int, int>>> colors;  // color -> (key, rank)
  for (int r = 0; r < size(); ++r) {
    const auto& part = op.parts[size_t(r)];
    if (part.color >= 0) colors[part.color].emplace_back(part.key, r);
  }
  for (auto& [color, ranks] : colors) {
    std::ranges::sort(ranks);
    std::vector<int> members;
    for (const auto& [key, rank] : ranks) members.push_back(world_rank(rank));
    const auto group = make(world_, cat(name_, "/", op.sequence, ".", color), std::move(members));
    for (int place = 0; place < int(ranks.size()); ++place)
      op.formed[size_t(ranks[size_t(place)].second)] = {group, place};
  }
}

std::pair<std::shared_ptr<LocalGroup>, int> LocalGroup::split(int rank, int color, int key) {
  const auto pending = post(rank, {.kind = OpKind::Split, .color = color, .key = key});
  wait(rank, *pending);
  return static_cast<Collective&>(*pending).formed[size_t(rank)];
}

}  // namespace yoke::comm
