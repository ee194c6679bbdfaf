// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/world.h"

#include <algorithm>

namespace yoke::comm {
namespace {

// A deadline is a time point: now plus the timeout must exist.
WorldOptions within_reason(WorldOptions options) {
  constexpr Duration kLongest = std::chrono::hours(24 * 365);
  options.timeout = std::clamp(options.timeout, Duration(1), kLongest);
  return options;
}

}  // namespace

World::World(int size, WorldOptions options)
    : size_(size),
      options_(within_reason(std::move(options))),
      flights_(size, options_.flights_per_rank, clock_),
      left_(size_t(size)) {}

void World::fail(int rank, Kind kind, const std::string& what) {
  {
    MutexLock lock(mutex_);
    if (failure_) return;
    failure_ = Failure{.rank = rank, .kind = kind, .what = what, .others = {}};
    for (int other = 0; other < size_; ++other)
      if (other != rank) failure_->others.push_back(whereabouts(other));
    failed_.store(true, std::memory_order_release);
  }
  wake_all();
}

void World::raise(int rank) const {
  const auto first = failure();
  YOKE_CHECK(first);
  if (first->rank == rank || first->rank < 0) throw Error(first->kind, first->what);
  yoke::fail(Kind::Comm, "rank ", first->rank, " failed: ", first->what);
}

std::string World::whereabouts(int rank) const {
  return left(rank) ? cat("rank ", rank, ": returned") : flights_.describe(rank);
}

std::optional<World::Failure> World::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void World::leave(int rank) {
  left_[size_t(rank)].store(true, std::memory_order_release);
  wake_all();
}

std::shared_ptr<void> World::on_change(std::function<void()> wake) {
  auto token = std::make_shared<std::function<void()>>(std::move(wake));
  MutexLock lock(mutex_);
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  listeners_.push_back(token);
  return token;
}

void World::wake_all() {
  std::vector<std::shared_ptr<std::function<void()>>> awake;
  {
    MutexLock lock(mutex_);
    for (const auto& listener : listeners_)
      if (auto held = listener.lock()) awake.push_back(std::move(held));
  }
  for (const auto& wake : awake) (*wake)();
}

}  // namespace yoke::comm
