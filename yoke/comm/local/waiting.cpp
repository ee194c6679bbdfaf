// SPDX-License-Identifier: Apache-2.0
// How a rank waits inside a LocalGroup: a brief spin, then sleep; never past the deadline, never
// for a rank that has left, and at once out when the world has failed. A watchdog keeps the
// deadline of CUDA operations for which only a stream waits.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "yoke/comm/linger.h"
#include "yoke/comm/local/group.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

constexpr Duration kCudaPoll = 100us;
constexpr Duration kWatchdogPoll = 20ms;

}  // namespace

void LocalGroup::wait(int rank, const Pending& pending, Until until) {
  const bool crowded = more_than_cores(world_->size());
  Time deadline = SteadyClock().now() + world_->timeout();
  auto reached = [&] { return until == Until::Enqueued ? pending.done() : pending.over(); };
  auto hopeless = [&] { return world_->failed() && !pending.settled(); };
  auto news = [&] {
    return reached() || claimable_.load(std::memory_order_acquire) > 0 || hopeless();
  };
  while (!reached()) {
    if (help(rank, /*steal=*/true)) continue;
    if (hopeless()) world_->raise(world_rank(rank));
    if (linger(crowded, news)) continue;
    const uint32_t seen = changed_.key();
    check_missing(rank, pending);
    if (news()) continue;
    const Time now = SteadyClock().now();
    if (now >= deadline) {
      if (!world_->on_its_way(missing_in(pending)))
        call_off(rank, Kind::Timeout,
                 cat("rank ", world_rank(rank), " waited ", lateness(pending)));
      deadline = now + world_->timeout();
    }
    const bool poll = pending.on_cuda && until == Until::Over;  // a stream does not notify
    changed_.wait(seen, poll ? std::min(deadline, now + kCudaPoll) : deadline);
  }
}

void LocalGroup::stream_wait(int rank, const Pending& pending, at::Device device) {
  // Ranks that share a GPU share autograd's thread for it: inside backward the host must not wait
  // for a peer, so the stream does. Elsewhere the host waits until all have come: a stream that
  // waits for what nobody has enqueued yet makes any synchronous CUDA call of this process wait
  // too, the peer's included.
  const bool inside_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!inside_backward) wait(rank, pending, Until::Enqueued);
  if (world_->failed() && !pending.settled()) world_->raise(world_rank(rank));
  if (pending.done())
    cuda_wait(*pending.launched, device);
  else
    pending.lane->wait_for(pending.lane_number, device);
}

void LocalGroup::check_missing(int rank, const Pending& pending) {
  if (const auto reason = world_->in_vain(world_rank(rank), cat(pending.text(), " on ", name_),
                                          members_, [&] { return missing_in(pending); }))
    call_off(rank, Kind::Comm, *reason);
}

std::vector<int> LocalGroup::missing_in(const Pending& pending) {
  MutexLock lock(mutex_);
  return pending.missing;
}

std::string LocalGroup::lateness(const Pending& pending) {
  return world_->lateness(cat(pending.text(), " on ", name_), members_, missing_in(pending));
}

void LocalGroup::watch(std::shared_ptr<Pending> pending) {
  watched_.push_back({std::move(pending), SteadyClock().now() + world_->timeout()});
  if (!watchdog_.joinable())
    watchdog_ = std::jthread([this](const std::stop_token& stop) { watchdog(stop); });
}

void LocalGroup::collect() {
  std::erase_if(watched_, [](const Watched& watched) {
    if (!watched.pending->over()) return false;
    watched.pending->drop_tensors();
    return true;
  });
}

void LocalGroup::watchdog(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::shared_ptr<Pending> late;
    {
      MutexLock lock(mutex_);
      collect();
      const auto it = std::ranges::find_if(
          watched_, [](const Watched& w) { return SteadyClock().now() >= w.deadline; });
      if (it != watched_.end()) late = it->pending;
      // What an operation in flight writes later can undo a release, so it is repeated.
      if (world_->failed()) {
        if (lane_) lane_->release();
        for (auto& [ends, channel] : channels_)
          if (channel.lane) channel.lane->release();
      }
    }
    if (late) world_->fail(-1, Kind::Timeout, cat("waited ", lateness(*late)));
    const uint32_t seen = changed_.key();
    if (!stop.stop_requested()) changed_.wait(seen, SteadyClock().now() + kWatchdogPoll);
  }
}

}  // namespace yoke::comm
