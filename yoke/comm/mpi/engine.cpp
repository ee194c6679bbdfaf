// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/mpi/engine.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <thread>

#include "yoke/comm/linger.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

// A peer that is about to come is met by polling; one that shares our core needs us to yield. MPI
// moves large transfers on while it is polled, so sleep comes late, and is short at first.
constexpr Duration kSpin = 20us, kYield = 5ms;
constexpr Duration kMaxSleep = 200us;
// What MPI brings and what the side channel brings come in any order. For so long the one is given
// the time to explain the other.
constexpr Duration kPatience = 1s;
// Fresh memory costs a page fault every 4 KiB, so scratch up to this size is used again.
constexpr int64_t kMaxSpareBytes = 64 << 20;

}  // namespace

std::string MpiTask::text() const {
  const std::string name = cat(to_string(kind), " #", sequence);
  if (line == kCollectives) return name;
  return cat(name, kind == OpKind::Send ? " to rank " : " from rank ",
             group->members[size_t(part.root)]);
}

MpiRank::MpiRank(std::shared_ptr<World> world, std::shared_ptr<MpiChannel> channel)
    : world_(std::move(world)),
      channel_(std::move(channel)),
      rank_(world_->first_here()),
      crowded_(more_than_cores(world_->ranks_on_host(rank_))) {}

void MpiRank::leave() {
  try {
    for (const auto& task : std::vector(live_))
      if (!world_->failed()) await(*task);
  } catch (const std::exception&) {  // the world has failed now, and its other waits say why
  }
}

MpiRank::~MpiRank() {
  if (!live_.empty() || world_->failed())
    keep_for_mpi(std::make_shared<std::pair<decltype(live_), std::shared_ptr<MpiChannel>>>(
        std::move(live_), channel_));
}

std::shared_ptr<MpiGroup> MpiRank::form_group(std::string name, std::vector<int> members,
                                              int context) {
  next_context_ = std::max(next_context_, context + 1);
  const auto me = std::ranges::find(members, rank_);
  if (me == members.end()) return nullptr;
  const int rank = int(me - members.begin());
  const size_t size = members.size();
  auto group = std::make_shared<MpiGroup>(MpiGroup{.name = std::move(name),
                                                   .id = world_->next_group_id(),
                                                   .members = std::move(members),
                                                   .rank = rank,
                                                   .context = context});
  group->num_sends.resize(size);
  group->num_recvs.resize(size);
  world_->flights().name_group(group->id, group->name);
  return group;
}

void MpiRank::call_off(int rank, Kind kind, const std::string& what) {
  world_->fail(rank, kind, what);
  world_->raise(rank_);
}

std::shared_ptr<MpiTask> MpiRank::post(const std::shared_ptr<MpiGroup>& group, Operation part) {
  world_->check(rank_);
  if (world_->options().before_issue) world_->options().before_issue(rank_, part.kind);
  const OpKind kind = part.kind;
  const auto task = std::make_shared<MpiTask>(std::move(part), group);
  const int peer = task->part.root;
  if (kind == OpKind::Send) {
    task->sequence = group->num_sends[size_t(peer)]++;
  } else if (kind == OpKind::Recv) {
    task->line = peer;
    task->sequence = group->num_recvs[size_t(peer)]++;
  } else {
    task->line = MpiTask::kCollectives;
    task->sequence = group->num_collectives++;
  }
  task->ticket = world_->flights().post(rank_, {.kind = to_string(kind),
                                                .group = group->id,
                                                .sequence = task->sequence,
                                                .bytes = task->part.bytes(),
                                                .peer = peer,
                                                .message = task->line != MpiTask::kCollectives});
  task->steps = steps_of(*this, *task);
  live_.push_back(task);
  progress();
  return task;
}

void MpiRank::progress() {
  busy_lines_.clear();
  for (const auto& task : live_) {
    const std::pair<const MpiGroup*, int> line(task->group.get(), task->line);
    if (std::ranges::count(busy_lines_, line) > 0) continue;
    if (!advance(*task) && task->line != MpiTask::kNoLine) busy_lines_.push_back(line);
  }
  std::erase_if(live_, [](const auto& task) { return task->done; });
}

bool MpiRank::advance(MpiTask& task) {
  try {
    while (task.transfers.done()) {
      if (task.next_step == task.steps.size()) {
        finish(task);
        return true;
      }
      task.steps[task.next_step++]();
    }
    return false;
  } catch (const std::exception& error) {
    // That a peer is dead is often seen here first, as an error of MPI that names no cause.
    world_->failed_soon();
    call_off(rank_, Kind::Comm,
             cat(task.text(), " on ", task.group->name, " broke off: ", error.what()));
  }
}

void MpiRank::finish(MpiTask& task) {
  if (task.scratch.defined() && task.scratch.numel() <= kMaxSpareBytes &&
      (!spare_.defined() || spare_.numel() < task.scratch.numel()))
    spare_ = std::move(task.scratch);
  task.scratch.reset();
  task.steps.clear();
  // Its tensors are the caller's again. The peer stays, for the text.
  task.part = Operation{.kind = task.kind, .root = task.part.root};
  world_->flights().finish(rank_, task.ticket);
  task.done = true;
}

Bytes MpiRank::scratch(MpiTask& task, size_t bytes) {
  task.scratch = std::move(spare_);
  if (!task.scratch.defined() || task.scratch.nbytes() < bytes)
    task.scratch = at::empty({int64_t(bytes)}, at::kByte);
  return {static_cast<char*>(task.scratch.mutable_data_ptr()), bytes};
}

bool MpiRank::poll(const MpiTask& task) {
  try {
    if (!task.done && !world_->failed()) progress();
  } catch (const std::exception&) {
  }
  return task.done;
}

void MpiRank::wait(const MpiTask& task) {
  if (const auto gone = await(task)) call_off(rank_, Kind::Comm, *gone);
}

std::optional<std::string> MpiRank::await(const MpiTask& task) {
  const Time start = SteadyClock().now();
  std::optional<Duration> gone_after;
  while (!task.done) {
    progress();
    if (task.done) break;
    world_->check(rank_);
    const Duration waited = SteadyClock().now() - start;
    if (waited < kSpin && !crowded_) continue;
    if (waited < kYield) {
      std::this_thread::yield();
      continue;
    }
    if (auto gone = complaint(task)) {
      // A receiver may be gone before MPI has told us that it took the message.
      if (!gone_after) gone_after = waited;
      if (task.kind != OpKind::Send || waited > *gone_after + kPatience) return gone;
    }
    if (waited >= world_->timeout())
      call_off(rank_, Kind::Timeout,
               cat("rank ", rank_, " waited ",
                   world_->lateness(cat(task.text(), " on ", task.group->name), task.group->members,
                                    missing_in(task))));
    std::this_thread::sleep_for(std::min(kMaxSleep, waited / 100));
  }
  return std::nullopt;
}

std::optional<std::string> MpiRank::complaint(const MpiTask& task) {
  return world_->in_vain(rank_, cat(task.text(), " on ", task.group->name), task.group->members,
                         [&] {
                           progress();
                           return task.done ? std::vector<int>{} : missing_in(task);
                         });
}

std::vector<int> MpiRank::missing_in(const MpiTask& task) const {
  std::vector<int> missing;
  if (task.line == MpiTask::kCollectives) {
    for (const int member : task.group->members)
      if (!world_->has_called(member, task.group->id, task.sequence)) missing.push_back(member);
  } else if (!task.met) {
    missing.push_back(task.group->members[size_t(task.part.root)]);
  }
  return missing;
}

}  // namespace yoke::comm
