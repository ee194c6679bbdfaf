// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/nccl/rank.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

constexpr Duration kPoll = 100us;    // a stream does not notify
constexpr Duration kSpin = 300us;    // what comes soon is awaited without sleeping
constexpr Duration kSpinDone = 5ms;  // after that a nap is a small part of the wait
constexpr Duration kLook = 1ms;      // between two looks at deadlines and errors
constexpr Duration kSettle = 5ms;    // NCCL takes some microseconds for a launch
constexpr Duration kGrace = 100ms;   // for what a rank that has left had still enqueued
// NCCL reports a peer's end as an error of its own; the side channel may know the cause.
constexpr Duration kTrueCause = 1s;
constexpr Duration kEnd = 10s;  // for what should end by itself

Time now() { return SteadyClock().now(); }

bool comes_soon(const std::function<bool()>& ready, Duration spin = kSpin) {
  for (const Time end = now() + spin; now() < end; std::this_thread::yield())
    if (ready()) return true;
  return false;
}

// As one group: all are told to end before the first frees memory, which waits for the kernels of
// all.
void abort_all(const NcclApi& api, const std::vector<NcclComm>& comms) {
  api.group_start();
  for (const NcclComm comm : comms) api.abort(comm);
  api.group_end();
}

bool in_progress(const NcclApi& api, NcclComm comm) {
  NcclResult state{};
  return api.async_error(comm, &state) == NcclResult::Success && state == NcclResult::InProgress;
}

// "all_reduce #5", "recv #0 from rank 1"
std::string text_of(const NcclPending::Part& part, const NcclGroup& group) {
  const Operation& op = part.operation;
  std::string text = cat(to_string(op.kind), " #", part.sequence);
  if (op.point_to_point())
    text +=
        cat(op.kind == OpKind::Send ? " to rank " : " from rank ", group.members[size_t(op.root)]);
  return cat(text, " on ", group.name);
}

}  // namespace

// Every rank of a group must finalize it, and a blocking communicator waits for that: so all at the
// same time, and not without end.
NcclProcess::~NcclProcess() {
  MutexLock lock(mutex_);
  std::atomic<size_t> ended{0};
  std::atomic<bool> well{!world->failed()};
  {
    std::vector<std::jthread> threads;
    for (const NcclComm comm : comms_)
      if (well)
        threads.emplace_back([&, comm] {
          api.finalize(comm);
          while (well && in_progress(api, comm)) std::this_thread::sleep_for(kPoll);
          ++ended;
        });
    const Time deadline = now() + kEnd;
    while (well && ended < comms_.size()) {
      std::this_thread::sleep_for(kPoll);
      if (now() >= deadline) well = false;
    }
    if (!well) abort_all(api, comms_);
  }
  if (well)
    for (const NcclComm comm : comms_) api.destroy(comm);
  for (const auto& [memory, block] : blocks_) api.mem_free(memory);
  for (const auto stream : streams_) cudaStreamDestroy(stream);
}

uint32_t NcclProcess::group_id(const std::string& name) {
  MutexLock lock(mutex_);
  const auto [entry, fresh] = ids_.try_emplace(name, 0);
  if (fresh) {
    entry->second = world->next_group_id();
    world->flights().name_group(entry->second, name);
  }
  return entry->second;
}

void NcclProcess::retire(NcclComm comm, NcclApi::Stream stream) {
  MutexLock lock(mutex_);
  if (comm != nullptr) comms_.push_back(comm);
  if (stream != nullptr) streams_.push_back(stream);
}

bool NcclProcess::share_a_gpu(int rank, int other) const {
  return world->here(other) && other != rank &&
         devices_[size_t(rank - world->first_here())] ==
             devices_[size_t(other - world->first_here())];
}

void NcclProcess::add_bell(std::shared_ptr<EventCount> bell) {
  MutexLock lock(mutex_);
  bells_.push_back(std::move(bell));
}

void NcclProcess::note_launch(const NcclCall& call, uint64_t sequence) {
  MutexLock lock(mutex_);
  launched_[call] = sequence + 1;
  for (const auto& bell : bells_) bell->notify_all();
}

bool NcclProcess::have_launched(const std::vector<std::pair<NcclCall, uint64_t>>& calls) {
  MutexLock lock(mutex_);
  return std::ranges::all_of(calls, [&](const auto& call) YOKE_REQUIRES(mutex_) {
    const auto found = launched_.find(call.first);
    return found != launched_.end() && found->second > call.second;
  });
}

NcclProcess::Memory NcclProcess::take_memory(size_t bytes, int rank) {
  if (api.mem_alloc == nullptr || bytes == 0) return {};
  MutexLock lock(mutex_);
  for (auto& [memory, block] : blocks_)
    if (!block.used && block.rank == rank && block.bytes == bytes) {
      block.used = true;
      return {memory, false};
    }
  void* memory = nullptr;
  if (api.mem_alloc(&memory, bytes) != NcclResult::Success) return {};
  blocks_[memory] = {bytes, rank, true};
  return {memory, true};
}

void NcclProcess::give_memory(void* memory) {
  MutexLock lock(mutex_);
  blocks_[memory].used = false;
}

NcclRank::NcclRank(std::shared_ptr<NcclProcess> process, int rank, int device)
    : process_(std::move(process)),
      rank_(rank),
      device_(at::kCUDA, c10::DeviceIndex(device)),
      wake_token_(world().on_change([changed = changed_] { changed->notify_all(); })),
      thread_([this](const std::stop_token& stop) { run(stop); }) {
  process_->add_bell(changed_);
}

NcclRank::~NcclRank() {
  thread_.request_stop();
  changed_->notify_all();
  thread_.join();
  for (const auto& group : groups_) {
    process_->retire(group.comm, group.stream);
    process_->retire(group.origin, nullptr);
  }
}

NcclGroup& NcclRank::await_world() {
  await([&] { return world_group_.load(std::memory_order_acquire) != nullptr; }, connect_deadline(),
        kSpin, kEnd);
  return *world_group_;
}

std::shared_ptr<NcclPending> NcclRank::issue(NcclGroup& group, std::vector<Operation> operations) {
  world().check(rank_);
  auto pending = std::make_shared<NcclPending>();
  pending->group = &group;
  pending->deadline = now() + world().timeout();
  for (const auto& operation : operations) {
    if (world().options().before_issue) world().options().before_issue(rank_, operation.kind);
    const at::Tensor& subject = operation.subject();
    if (subject.defined() && subject.device() != device_)
      fail(Kind::Usage, to_string(operation.kind), " on ", group.name, ": rank ", rank_, " drives ",
           device_, ", and the tensor is on ", subject.device());
    if (subject.defined() && !pending->mark) pending->mark = cuda_mark_busy(device_);
    pending->host_waits |= operation.kind == OpKind::Barrier;
  }
  {
    MutexLock lock(mutex_);
    for (auto& operation : operations) {
      uint64_t& count = operation.point_to_point()
                            ? group.num_messages[{operation.kind, operation.root}]
                            : group.num_collectives;
      const uint64_t sequence = count++;
      const uint64_t ticket =
          world().flights().post(rank_, {.kind = to_string(operation.kind),
                                         .group = group.id,
                                         .sequence = sequence,
                                         .bytes = operation.bytes(),
                                         .peer = operation.root,
                                         .message = operation.point_to_point()});
      const bool message = operation.point_to_point();
      for (int r = 0; r < group.size(); ++r) {
        const int other = group.members[size_t(r)];
        if (!process_->share_a_gpu(rank_, other) || (message && r != operation.root)) continue;
        const OpKind answer = operation.kind == OpKind::Send ? OpKind::Recv : OpKind::Send;
        pending->beside.push_back(
            {{group.id, other, message ? answer : OpKind::Barrier, message ? group.rank : -1},
             sequence});
      }
      pending->parts.push_back({std::move(operation), sequence, ticket});
    }
    queue_.push_back(pending);
  }
  changed_->notify_all();
  return pending;
}

void NcclRank::await(const std::function<bool()>& ready, Time deadline, Duration spin,
                     Duration nap) {
  if (comes_soon(ready, spin)) return;
  while (true) {
    const uint32_t seen = changed_->key();
    const bool hopeless = aborting_;
    if (ready()) return;
    if (hopeless) world().raise(rank_);
    const Time last = deadline + kTrueCause;
    if (now() >= last)
      call_off(Kind::Timeout,
               cat("rank ", rank_, " waited past the deadline for its issuing thread, ",
                   "which a call to CUDA or NCCL holds up"));
    changed_->wait(seen, std::min(now() + nap, last));
  }
}

void NcclRank::await_launch(const NcclPending& pending) {
  await([&] { return pending.launched(); }, pending.deadline, kSpin, kEnd);
}

bool NcclRank::done(const NcclPending& pending) const {
  const bool passed = pending.launched() && cuda_passed(*pending.done);
  return (passed && !aborting_) || pending.over();
}

// Ranks that share a GPU share autograd's thread for it: inside backward the host must not wait for
// a peer. Elsewhere it waits until those have launched it too: else a synchronous call of this
// rank could hold a lock of CUDA's while it waits for a kernel that they cannot launch without it.
void NcclRank::await_those_beside(const NcclPending& pending) {
  if (pending.beside.empty() || torch::autograd::get_current_graph_task_id() != -1) return;
  await([&] { return process_->have_launched(pending.beside); }, pending.deadline, kSpin, kEnd);
}

at::Tensor NcclRank::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  const c10::cuda::CUDAGuard guard(device_);
  const auto [memory, fresh] = process_->take_memory(bytes, rank_);
  if (memory == nullptr) return at::empty(sizes, options.device(device_));
  if (fresh) {
    MutexLock lock(mutex_);
    to_register_.emplace_back(memory, bytes);
  }
  changed_->notify_all();
  return at::from_blob(
      memory, sizes, [process = process_](void* given) { process->give_memory(given); },
      options.device(device_));
}

// So that NCCL reads and writes it directly. Where it cannot, it copies as ever.
void NcclRank::register_memory() {
  std::vector<std::pair<void*, size_t>> fresh;
  {
    MutexLock lock(mutex_);
    fresh.swap(to_register_);
  }
  if (api().comm_register == nullptr) return;
  for (const auto& [memory, bytes] : fresh)
    for (const auto& group : groups_) {
      void* handle = nullptr;  // goes with its communicator
      if (group.comm != nullptr) api().comm_register(group.comm, memory, bytes, &handle);
    }
}

void NcclRank::wait(const NcclPending& pending) {
  await_launch(pending);
  await_those_beside(pending);
  if (world().failed() && !done(pending)) world().raise(rank_);
  cuda_wait(*pending.done, device_);
}

void NcclRank::synchronize(const NcclPending& pending) {
  await_launch(pending);
  await([&] { return done(pending); }, pending.deadline, kSpinDone, kPoll);
}

void NcclRank::run(const std::stop_token& stop) {
  try {
    cuda_use(device_.index());
    std::vector<int> everybody(size_t(world().size()));
    std::iota(everybody.begin(), everybody.end(), 0);
    world_group_.store(&form("world", everybody, rank_), std::memory_order_release);
    changed_->notify_all();
    for (bool busy = false; true;) {
      const uint32_t seen = changed_->key();
      register_memory();
      if (const auto pending = next()) {
        busy = true;
        launch(pending);
        changed_->notify_all();
        if (now() - last_look_ >= kLook) poll();  // launches come first
        continue;
      }
      if (std::exchange(busy, false) && comes_soon([&] { return changed_->key() != seen; }))
        continue;
      poll();
      if (stop.stop_requested()) {  // a message to itself that nobody will answer
        std::erase_if(in_flight_, [](const auto& pending) { return pending->open > 0; });
        if (in_flight_.empty()) return;
      }
      changed_->wait(seen, now() + (in_flight_.empty() ? Duration(1s) : kLook));
    }
  } catch (const Error& error) {
    world().fail(rank_, error.kind(), error.what());
  } catch (const c10::Error& error) {
    world().fail(rank_, Kind::Device, error.what_without_backtrace());
  } catch (const std::exception& error) {
    world().fail(rank_, Kind::Internal, error.what());
  }
  give_up();
}

std::shared_ptr<NcclPending> NcclRank::next() {
  MutexLock lock(mutex_);
  if (queue_.empty()) return nullptr;
  const auto pending = std::move(queue_.front());
  queue_.pop_front();
  return pending;
}

void NcclRank::reap() {
  std::vector<const NcclGroup*> busy;  // a group's operations end in order: one query is enough
  std::erase_if(in_flight_, [&](const std::shared_ptr<NcclPending>& pending) {
    if (!pending->launched() || std::ranges::count(busy, pending->group) > 0) return false;
    if (!cuda_passed(*pending->done)) {
      busy.push_back(pending->group);
      return false;
    }
    for (const auto& part : pending->parts) world().flights().finish(rank_, part.ticket);
    pending->parts.clear();
    pending->stage.store(NcclPending::Stage::Over, std::memory_order_release);
    return true;
  });
}

void NcclRank::poll() {
  world().check(rank_);
  reap();
  const Time time = now();
  if (time - last_look_ < kLook) return;
  last_look_ = time;
  for (const auto& pending : in_flight_) look_after(*pending, time);
  for (const auto& group : groups_) {
    if (group.comm == nullptr) continue;
    NcclResult state{};
    check(api().async_error(group.comm, &state), group.comm, group.name);
    check(state, group.comm, group.name);
  }
}

void NcclRank::look_after(NcclPending& pending, Time time) {
  const NcclGroup& group = *pending.group;
  for (const auto& part : pending.parts) {
    const auto missing = [&] { return missing_in(part, group); };
    if (time >= pending.deadline.load()) {
      const auto absent = missing();
      if (absent.empty() && &part != &pending.parts.back()) continue;  // the first that is missed
      call_off(Kind::Timeout,
               cat("rank ", rank_, " waited ",
                   world().lateness(text_of(part, group), group.members, absent),
                   absent.empty() ? "; all have called, run.check compares the calls" : ""));
    }
    const auto reason = world().in_vain(rank_, text_of(part, group), group.members, missing);
    if (!reason) continue;
    // What a rank that has left had still enqueued gets a moment to end.
    if (!pending.suspected) pending.suspected = time;
    if (time - *pending.suspected >= kGrace) call_off(Kind::Comm, *reason);
    return;
  }
}

std::vector<int> NcclRank::missing_in(const NcclPending::Part& part, const NcclGroup& group) const {
  std::vector<int> missing;
  if (!part.operation.point_to_point()) {
    for (const int member : group.members)
      if (!world().has_called(member, group.id, part.sequence)) missing.push_back(member);
    return missing;
  }
  const int peer = group.members[size_t(part.operation.root)];
  const std::string_view answer =
      to_string(part.operation.kind == OpKind::Send ? OpKind::Recv : OpKind::Send);
  const auto records = world().flights().records(peer);
  const bool came = std::ranges::any_of(records, [&](const auto& record) {
    return record.flight.kind == answer && record.flight.group == group.id &&
           record.flight.sequence >= part.sequence && record.flight.peer == group.rank;
  });
  if (!came) missing.push_back(peer);
  return missing;
}

void NcclRank::call_off(Kind kind, const std::string& what) {
  world().fail(rank_, kind, what);
  world().raise(rank_);
}

void NcclRank::check(NcclResult result, NcclComm comm, const std::string& what) {
  if (result == NcclResult::Success || result == NcclResult::InProgress) return;
  world().failed_soon();
  call_off(result == NcclResult::RemoteError ? Kind::Comm : Kind::Device,
           cat("NCCL ", api().version_text(), ", ", what, ": ", api().error_string(result), "; ",
               api().last_error(comm)));
}

void NcclRank::settle(const NcclGroup& group, const std::string& what, Time deadline) {
  auto settled = [&] {
    NcclResult state{};
    check(api().async_error(group.comm, &state), group.comm, what);
    check(state, group.comm, what);
    return state == NcclResult::Success;
  };
  // A launch that is under way is brought to its end even if the world fails meanwhile.
  for (const Time end = now() + kSettle; now() < end; std::this_thread::yield())
    if (settled()) return;
  wait_until(settled, what, deadline);
}

void NcclRank::wait_until(const std::function<bool()>& ready, const std::string& what,
                          Time deadline) {
  while (!ready()) {
    poll();
    if (now() >= deadline)
      call_off(Kind::Timeout, cat("rank ", rank_, " waited too long for ", what));
    std::this_thread::sleep_for(kPoll);
  }
}

std::string NcclRank::fetch(const std::string& key, Time deadline) {
  wait_until([&] { return world().store().has(key); }, cat("'", key, "' in the store"), deadline);
  return world().store().get(key, world().timeout());
}

void NcclRank::give_up() {
  // What all have joined will be done whatever else fails: it gets a moment to end.
  auto joined = [&](const std::shared_ptr<NcclPending>& pending) {
    return pending->launched() && std::ranges::all_of(pending->parts, [&](const auto& part) {
             return missing_in(part, *pending->group).empty();
           });
  };
  for (const Time end = now() + kGrace; now() < end;) {
    reap();
    if (std::ranges::none_of(in_flight_, joined)) break;
    std::this_thread::sleep_for(kPoll);
  }
  aborting_ = true;
  std::vector<NcclComm> comms;
  for (auto& group : groups_)
    for (NcclComm* comm : {&group.comm, &group.origin})
      if (*comm != nullptr) comms.push_back(std::exchange(*comm, nullptr));
  abort_all(api(), comms);
  changed_->notify_all();
  // What the kernels may still touch stays alive until they have left.
  const Time deadline = now() + kEnd;
  for (const auto& group : groups_)
    while (group.stream != nullptr && cudaStreamQuery(group.stream) == cudaErrorNotReady &&
           now() < deadline)
      std::this_thread::sleep_for(kPoll);
  for (auto& group : groups_) group.self_sends.clear(), group.self_recvs.clear();
  in_flight_.clear();
  MutexLock lock(mutex_);
  queue_.clear();
}

}  // namespace yoke::comm
