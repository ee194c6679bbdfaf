// SPDX-License-Identifier: Apache-2.0
// Which device computes what, and when it is bound to it.
#include <algorithm>
#include <cstring>

#include "yoke/base/error.h"
#include "yoke/serve/pool_impl.h"

namespace yoke::serve {
namespace {

constexpr int kLookAhead = 64;  // requests of a queue that are asked whether they fit

uint64_t align(uint64_t offset) { return (offset + 63) / 64 * 64; }

// Alone in its batch, whoever else waits.
bool is_single(const Ticket& ticket) {
  return is_whole(ticket.request, *ticket.model->facts) || ticket.alone ||
         !ticket.request.parameters.sequence.empty();
}

void set_place(TensorPlace& place, uint64_t offset, const Tensor& tensor, uint64_t bytes) {
  place = {.offset = offset,
           .bytes = bytes,
           .type = int32_t(tensor.type),
           .rank = int32_t(tensor.shape.size())};
  std::ranges::copy(tensor.shape, place.shape.begin());
}

void copy_rows(const Batch& batch, const Entry& entry) {
  const Slab& slab = batch.channel->slab(batch.slab);
  const auto& ticket = *entry.ticket;
  const auto& header = *slab.header;
  for (uint32_t i = 0; i < header.num_inputs && !ticket.request.prompt; ++i) {
    const auto& place = header.inputs[i];
    const auto& data = ticket.request.inputs[i].data;
    const size_t row = header.has_rows ? place.bytes : data.size();
    std::memcpy(slab.data + place.offset + row * entry.at, data.data() + row * size_t(entry.from),
                row * size_t(entry.rows));
  }
  for (int64_t i = 0; i < entry.rows; ++i)
    slab.owners[entry.at + i] = ticket.row_key + uint64_t(entry.from + i);
}

}  // namespace

Hosted* Pool::Impl::ready_on(const Seat& seat, const Model& model) const {
  for (auto* hosted : seat.hosted)
    if (hosted->model.get() == &model && hosted->state == Hosted::State::Ready) return hosted;
  return nullptr;
}

bool Pool::Impl::may_use(int tenant, const Seat& seat) const {
  if (seat.owner >= 0) return seat.owner == tenant;
  const auto& asks = *tenants_[size_t(tenant)];
  return asks.config.devices.empty() || !asks.active;
}

// Whether a request that may have killed a worker can be tried again: one at a time, and only where
// another replica goes on if it kills this one too.
bool Pool::Impl::may_try(const Model& model) const {
  const auto ready = std::ranges::count_if(
      model.hosted, [](const auto& one) { return one->state == Hosted::State::Ready; });
  const auto may_come_back = std::ranges::count_if(
      model.hosted, [](const auto& one) { return one->quick_deaths < kGivenUp; });
  if (ready < 2 && may_come_back > 1) return false;
  return std::ranges::none_of(seats_, [&](const Seat& seat) {
    const auto suspect = [&](const BatchPtr& batch) {
      return batch && batch->suspect && batch->model.get() == &model;
    };
    return suspect(seat.first) || suspect(seat.second);
  });
}

bool Pool::Impl::may_go_elsewhere(const Ticket& ticket, const Hosted& from) const {
  return std::ranges::any_of(ticket.model->hosted, [&](const auto& other) {
    return other.get() != &from && other->state == Hosted::State::Ready &&
           may_use(ticket.tenant, *other->seat);
  });
}

// The first request of a tenant that this seat can take, or that fits into the batch.
TicketPtr Pool::Impl::next_of(int number, const Seat& seat, const Batch* with) const {
  const auto& tenant = *tenants_[size_t(number)];
  if (tenant.queues.empty() || !may_use(number, seat)) return nullptr;
  if (with && (with->full || (with->only >= 0 && with->only != number))) return nullptr;
  const bool apart = tenant.config.exclusive_batch;
  if (with && apart && with->only != number) return nullptr;
  TicketPtr best;
  for (const auto& [model, queue] : tenant.queues) {
    if (with && model != with->model.get()) continue;
    if (!with && !ready_on(seat, *model)) continue;
    int looked = 0;
    for (const auto& [key, ticket] : queue) {
      if (ticket->sequence && ticket->sequence->hosted->seat != &seat) continue;
      if (ticket->alone && !may_try(*model)) continue;
      const auto& doubts = ticket->doubts;
      if (doubts && doubts->seat == &seat && may_go_elsewhere(*ticket, *doubts)) continue;
      if (++looked > kLookAhead) break;
      if (with) {
        if (is_single(*ticket) || ticket->shape_key != with->shape_key) continue;
        const int64_t room = with->capacity - with->rows;
        if (!with->model->facts->pure && ticket->todo.front().count > room) continue;
      }
      if (!best || key < std::pair(best->request.parameters.priority, best->number)) best = ticket;
      break;
    }
  }
  return best;
}

std::optional<FairShare::Turn> Pool::Impl::pick(Seat& seat, const Batch* with, int idle) {
  std::vector<int> waiting;
  for (size_t i = 0; i < tenants_.size(); ++i)
    if (!tenants_[i]->queues.empty() && next_of(int(i), seat, with)) waiting.push_back(int(i));
  if (waiting.empty()) return std::nullopt;
  if (seat.owner >= 0) return FairShare::Turn{.tenant = seat.owner};
  const Time now = clock_.now();
  if (options_.policy != "fair") return pick_otherwise(seat, with, waiting);
  auto turn = share_.pick(now, waiting, idle);
  if (!turn) {
    const Time again = share_.retry_at(now, waiting);
    if (!retry_at_ || again < *retry_at_) retry_at_ = again;
    look_by(again);
  }
  return turn;
}

// What others do, to be compared with: the oldest request, the first tenant, everyone in turn.
FairShare::Turn Pool::Impl::pick_otherwise(const Seat& seat, const Batch* with,
                                           const std::vector<int>& waiting) {
  int best = waiting[0];
  const auto arrival = [&](int tenant) { return next_of(tenant, seat, with)->number; };
  const auto last = [&](int tenant) { return tenants_[size_t(tenant)]->last_turn; };
  for (const int tenant : waiting)
    if ((options_.policy == "fifo" && arrival(tenant) < arrival(best)) ||
        (options_.policy == "round_robin" && last(tenant) < last(best)))
      best = tenant;
  tenants_[size_t(best)]->last_turn = ++turns_;
  return {.tenant = best, .borrows = true};
}

BatchPtr Pool::Impl::open_batch(Seat& seat, const Ticket& first) {
  Hosted* hosted = ready_on(seat, *first.model);
  if (!hosted || hosted->used[size_t(hosted->next_slab)]) return nullptr;
  auto batch = std::make_shared<Batch>();
  batch->hosted = hosted->shared_from_this();
  batch->channel = hosted->worker->shared_channel();
  batch->slab = hosted->next_slab;
  batch->model = first.model;
  batch->shape_key = first.shape_key;
  const bool whole = is_whole(first.request, *first.model->facts);
  auto& header = batch->header();
  header.has_rows = !whole;
  header.is_prompt = first.request.prompt.has_value();
  header.sequence_start = first.request.parameters.sequence_start;
  header.sequence_end = first.request.parameters.sequence_end;
  header.num_inputs = uint32_t(first.request.inputs.size());
  header.cancelled = 0;
  header.streamed = 0;
  header.sequence = {};
  const std::string sequence = sequence_key(first.tenant, first.request.parameters);
  std::memcpy(header.sequence.data(), sequence.data(),
              std::min(sequence.size(), header.sequence.size() - 1));
  uint64_t at = 0;
  if (whole) {
    if (first.request.prompt) {
      const std::string how = to_json(*first.request.prompt);
      const auto put = [&](uint32_t i, const std::string& text) {
        set_place(header.inputs[i], at, {.type = Type::Bytes, .shape = {1}}, text.size());
        std::memcpy(batch->channel->slab(batch->slab).data + at, text.data(), text.size());
        at = align(at + text.size());
      };
      header.num_inputs = 2;
      put(0, first.request.prompt->text);
      put(1, how);
    } else {
      for (uint32_t i = 0; i < header.num_inputs; ++i) {
        set_place(header.inputs[i], at, first.request.inputs[i],
                  first.request.inputs[i].data.size());
        at = align(at + first.request.inputs[i].data.size());
      }
    }
  } else {
    uint64_t row_bytes = 0;
    for (const auto& input : first.request.inputs)
      row_bytes += input.data.size() / size_t(input.shape[0]) + 64;
    const uint64_t fit = batch->channel->data_bytes() / 2 / std::max<uint64_t>(row_bytes, 1);
    const auto seen = first.model->seen.find(first.model->seen_as(first.shape_key));
    const uint64_t most =
        std::min<uint64_t>(uint64_t(first.model->facts->batch),
                           seen == first.model->seen.end() ? UINT32_MAX : seen->second.fit);
    batch->capacity = uint32_t(std::clamp<uint64_t>(fit, 1, most));
    for (uint32_t i = 0; i < header.num_inputs; ++i) {
      const auto& input = first.request.inputs[i];
      const uint64_t row = input.data.size() / size_t(input.shape[0]);
      set_place(header.inputs[i], at, input, row);
      at = align(at + row * batch->capacity);
    }
  }
  header.inputs_end = at;
  batch->full = is_single(first);
  batch->suspect = first.alone;
  if (tenants_[size_t(first.tenant)]->config.exclusive_batch) batch->only = first.tenant;
  hosted->used[size_t(batch->slab)] = true;
  hosted->next_slab = (hosted->next_slab + 1) % Channel::kSlabs;
  return batch;
}

void Pool::Impl::remove_from_queue(const Ticket& ticket) {
  auto& queues = tenants_[size_t(ticket.tenant)]->queues;
  const auto queue = queues.find(ticket.model.get());
  if (queue == queues.end()) return;
  queue->second.erase({ticket.request.parameters.priority, ticket.number});
  if (queue->second.empty()) queues.erase(queue);
}

// Puts rows into a batch, or into a new one, as long as there are some whose turn it is. True where
// it did. The mutex is free while many bytes are copied.
bool Pool::Impl::fill(Seat& seat, BatchPtr batch) {
  const bool fresh = !batch;
  int idle = seat.first == nullptr ? 0 : 1;
  for (const auto& other : seats_) idle += other.is_shared() && !other.first;
  std::vector<Entry> added;
  size_t bytes = 0;
  while (!batch || (batch->rows < batch->capacity && !(batch->full && batch->rows > 0))) {
    auto turn = pick(seat, batch.get(), idle);
    if (!turn) break;
    const TicketPtr ticket = next_of(turn->tenant, seat, batch.get());
    if (!batch) {
      batch = open_batch(seat, *ticket);
      if (!batch) return false;  // the slab is still being read
      (seat.first ? seat.second : seat.first) = batch;
    }
    auto& todo = ticket->todo.front();
    const int64_t rows = std::min<int64_t>(todo.count, batch->capacity - batch->rows);
    Entry entry{.ticket = ticket, .from = todo.from, .rows = rows, .at = batch->rows};
    if (seat.owner < 0) {
      const auto is_with = [&](const Entry& other) {
        return other.turn.tenant == turn->tenant && !other.turn.borrows;
      };
      turn->joins = !turn->borrows && (std::ranges::any_of(batch->entries, is_with) ||
                                       std::ranges::any_of(added, is_with));
      share_.start(*turn, Duration(int64_t(ticket->model->row_ns * double(rows))));
      entry.turn = *turn;
    } else {
      entry.turn.tenant = -1;
    }
    todo.from += rows;
    todo.count -= rows;
    if (todo.count == 0) ticket->todo.pop_front();
    if (ticket->todo.empty()) {
      remove_from_queue(*ticket);
      ticket->queued = false;
      --queued_;
    }
    batch->rows += uint32_t(rows);
    for (const auto& input : ticket->request.inputs)
      bytes += input.data.size() / size_t(ticket->rows) * size_t(rows);
    added.push_back(std::move(entry));
    if (ticket->alone) batch->full = true;
  }
  if (added.empty()) return false;
  seat.filling = true;
  seat.filled = batch;
  if (bytes >= kCopyUnlocked) mutex_.unlock();
  for (const auto& entry : added) copy_rows(*batch, entry);
  if (bytes >= kCopyUnlocked) {
    mutex_.lock();
    wake();  // it may have been done meanwhile, unseen
  }
  seat.filling = false;
  seat.filled = nullptr;
  if (fresh) batch->at = std::max(clock_.now(), batch == seat.first ? Time() : free_at(seat));
  publish(seat, batch, std::move(added));
  return true;
}

// The rows that were copied become the worker's to take; if it was faster they wait again.
void Pool::Impl::publish(Seat& seat, const BatchPtr& batch, std::vector<Entry> added) {
  uint32_t rows = 0;
  for (const auto& entry : added) rows += uint32_t(entry.rows);
  bool lost = batch->lost;
  if (!lost && !batch->published) {
    const bool next = seat.first == batch || (seat.first && seat.first->hosted == batch->hosted);
    batch->published = true;
    batch->header().state.store(SlabState{next ? Phase::Open : Phase::Held, rows}.word());
    if (next) batch->channel->to_worker().notify_all();
  } else if (!lost) {
    auto& state = batch->header().state;
    uint32_t word = state.load();
    const auto was = SlabState::of(word);
    lost = (was.phase != Phase::Open && was.phase != Phase::Held) ||
           !state.compare_exchange_strong(word, SlabState{was.phase, was.rows + rows}.word());
  }
  if (!lost) {
    for (auto& entry : added) batch->entries.push_back(std::move(entry));
    return;
  }
  batch->rows -= rows;
  for (auto& entry : added) requeue(entry);
}

// Rows that no worker has seen wait again, where they stood.
void Pool::Impl::requeue(Entry& entry) {
  if (entry.turn.tenant >= 0) share_.finish(entry.turn, {});
  if (entry.ticket->answered) return;
  entry.ticket->todo.push_front({entry.from, entry.rows});
  enqueue(entry.ticket);
}

// Takes a staged batch back, if its worker has not begun it.
bool Pool::Impl::withdraw(Seat& seat) {
  const BatchPtr batch = seat.second;
  if (!batch || seat.filling || !batch->published) return false;
  auto& state = batch->header().state;
  uint32_t word = state.load();
  const auto phase = SlabState::of(word).phase;
  if ((phase != Phase::Open && phase != Phase::Held) ||
      !state.compare_exchange_strong(word, SlabState{}.word()))
    return false;
  seat.second = nullptr;
  batch->hosted->next_slab = batch->slab;
  batch->hosted->used[size_t(batch->slab)] = false;
  for (auto& entry : batch->entries) requeue(entry);
  return true;
}

// What is staged behind a busy device goes to one that is idle.
bool Pool::Impl::steal_for(Seat& seat) {
  for (auto& other : seats_) {
    if (&other == &seat || !other.second || other.owner != seat.owner) continue;
    const auto& batch = *other.second;
    const Hosted* here = ready_on(seat, *batch.model);
    if (!here || here->used[size_t(here->next_slab)] || batch.entries.empty() ||
        batch.entries[0].ticket->sequence)
      continue;
    if (withdraw(other)) return true;
  }
  return false;
}

// A batch of borrowers that has not begun makes way for who is below its guarantee.
bool Pool::Impl::make_way(Seat& seat) {
  if (!seat.second || seat.owner >= 0 || seat.filling) return false;
  const auto& entries = seat.second->entries;
  if (entries.empty() ||
      !std::ranges::all_of(entries, [](const auto& e) { return e.turn.borrows; }))
    return false;
  const auto turn = pick(seat, nullptr, 1 << 20);
  return turn && !turn->borrows && withdraw(seat);
}

Time Pool::Impl::free_at(const Seat& seat) const {
  if (!seat.first) return clock_.now();
  return seat.first->at + Duration(int64_t(seat.first->model->row_ns * seat.first->rows));
}

void Pool::Impl::pump() {
  std::vector<Seat*> busy, stole;
  for (bool moved = true; moved;) {
    moved = false;
    retry_at_.reset();
    busy.clear();
    for (auto& seat : seats_) {
      if (seat.filling) continue;
      if (seat.first)
        busy.push_back(&seat);
      else if (queued_ > 0 && fill(seat, nullptr))
        moved = true;
      else if (!std::ranges::count(stole, &seat) && steal_for(seat)) {
        stole.push_back(&seat);  // once: whose turn it is here may be nobody's
        moved = true;
        fill(seat, nullptr);
      }
    }
    if (queued_ == 0) continue;
    std::ranges::sort(busy, {}, [&](const Seat* seat) { return free_at(*seat); });
    for (auto* seat : busy) {
      if (seat->filling || !seat->first) continue;
      const auto open = [](const BatchPtr& batch) {
        const bool room =
            batch && batch->published && !batch->full && batch->rows < batch->capacity;
        if (!room) return false;
        const auto phase = SlabState::of(batch->header().state.load()).phase;
        return phase == Phase::Open || phase == Phase::Held;
      };
      if (open(seat->first) && fill(*seat, seat->first))
        moved = true;
      else if (open(seat->second))
        moved |= fill(*seat, seat->second);
      else if (!seat->second && !seat->filling)
        moved |= fill(*seat, nullptr);
      if (queued_ > 0 && make_way(*seat)) moved |= fill(*seat, nullptr);
    }
  }
}

}  // namespace yoke::serve
