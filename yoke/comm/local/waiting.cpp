// SPDX-License-Identifier: Apache-2.0
// How a rank waits inside a LocalGroup: a brief spin, then sleep; never past the deadline, never for a
// rank that has left, and at once out when the world has failed. CUDA operations, for which no host
// thread waits, have a watchdog.
#include <algorithm>

#include "yoke/base/text.h"
#include "yoke/comm/local/group.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

// Longer than a peer needs to come out of a cache miss, shorter than a time slice.
constexpr Duration kSpin = 50us;
constexpr Duration kCudaPoll = 100us;
constexpr Duration kWatchdogPoll = 20ms;

template <typename News>
bool spin(Duration how_long, News news) {
  const Time until = SteadyClock().now() + how_long;
  do {
    for (int i = 0; i < 32; ++i) {
      if (news()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (SteadyClock().now() < until);
  return false;
}

}  // namespace

void LocalGroup::wait(int rank, const Pending& pending) {
  static const int kCores = int(std::thread::hardware_concurrency());
  const Duration patience = world_->size() > kCores ? kSpin / 25 : kSpin;
  const Time deadline = SteadyClock().now() + world_->timeout();
  auto hopeless = [&] { return world_->failed() && !pending.settled(); };
  auto news = [&] { return pending.over() || claimable_.load(std::memory_order_acquire) > 0 || hopeless(); };
  while (!pending.over()) {
    if (help(rank, /*steal=*/true)) continue;
    if (hopeless()) world_->raise(world_rank(rank));
    if (spin(patience, news)) continue;
    const uint32_t seen = changed_.key();
    check_missing(rank, pending);
    if (news()) continue;
    const Time now = SteadyClock().now();
    if (now >= deadline) call_off(rank, Kind::Timeout, cat("rank ", world_rank(rank), " waited ", lateness(pending)));
    changed_.wait(seen, pending.on_cuda ? std::min(deadline, now + kCudaPoll) : deadline);
  }
}

void LocalGroup::stream_wait(int rank, const Pending& pending, at::Device device) {
  if (world_->failed() && !pending.settled()) world_->raise(world_rank(rank));
  if (pending.done())
    cuda_wait(*pending.launched, device);
  else
    pending.lane->wait_for(pending.lane_number, device);
}

// A rank that has returned will never join: say so now, not at the deadline.
void LocalGroup::check_missing(int rank, const Pending& pending) {
  std::vector<int> missing;
  {
    MutexLock lock(mutex_);
    missing = pending.missing;
  }
  for (const int other : missing)
    if (world_->left(other))
      call_off(rank, Kind::Comm, cat(pending.text, ": rank ", world_rank(rank), " waits for rank ", other,
                                     ", which has returned without joining"));
}

std::string LocalGroup::lateness(const Pending& pending) {
  std::vector<int> missing;
  {
    MutexLock lock(mutex_);
    missing = pending.missing;
  }
  std::string arrived, absent;
  for (const int member : members_) {
    if (!std::ranges::count(missing, member))
      arrived += cat(arrived.empty() ? "" : ", ", member);
    else
      absent += cat(absent.empty() ? "" : "; ", world_->whereabouts(member));
  }
  return cat(duration_text(world_->timeout()), " (run.timeout_s) for ", pending.text, "; arrived: ",
             arrived.empty() ? "nobody" : arrived, "; not arrived: ", absent.empty() ? "nobody" : absent);
}

void LocalGroup::watch(std::shared_ptr<Pending> pending) {
  watched_.push_back({std::move(pending), SteadyClock().now() + world_->timeout()});
  if (!watchdog_.joinable()) watchdog_ = std::jthread([this](const std::stop_token& stop) { watchdog(stop); });
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
      const auto it = std::ranges::find_if(watched_, [](const Watched& w) { return SteadyClock().now() >= w.deadline; });
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
