// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/world.h"

#include <algorithm>
#include <thread>

#include "yoke/base/text.h"

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
    : World(Membership{std::vector<Place>(size_t(size)), 0, size, make_memory_store()},
            std::move(options)) {}

World::World(Membership members, WorldOptions options)
    : members_(std::move(members)),
      size_(int(members_.places.size())),
      first_(members_.first),
      count_(members_.count),
      options_(within_reason(std::move(options))),
      flights_(size_, options_.flights_per_rank, clock_),
      left_(size_t(size_)) {}

void World::fail(int rank, Kind kind, const std::string& what) {
  if (failed()) return;
  Failure failure{.rank = rank, .kind = kind, .what = what, .others = {}};
  for (int other = 0; other < size_; ++other)
    if (other != rank) failure.others.push_back(whereabouts(other));
  fail(std::move(failure));
}

void World::fail(Failure failure) {
  {
    MutexLock lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    failed_.store(true, std::memory_order_release);
  }
  wake_all();
}

bool World::failed_soon() const {
  const Time until = clock_.now() + std::chrono::seconds(1);
  while (!failed() && clock_.now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return failed();
}

void World::raise(int rank) const {
  const auto first = failure();
  YOKE_CHECK(first);
  if (first->rank == rank || first->rank < 0) throw Error(first->kind, first->what);
  yoke::fail(Kind::Comm, name_of(first->rank), " failed: ", first->what);
}

std::string World::name_of(int rank) const {
  if (one_process()) return cat("rank ", rank);
  return cat("rank ", rank, " (host ", place(rank).host, ", process ", place(rank).process, ")");
}

std::string World::whereabouts(int rank) const {
  const bool silent = !here(rank) && !flights_.last(rank);  // it may have come far all the same
  return cat(name_of(rank), ": ",
             left(rank) ? "returned"
             : silent   ? "nothing heard yet"
                        : flights_.describe(rank));
}

std::string World::lateness(const std::string& operation, const std::vector<int>& members,
                            const std::vector<int>& missing) const {
  std::string arrived, absent;
  for (const int member : members) {
    if (!std::ranges::count(missing, member))
      arrived += cat(arrived.empty() ? "" : ", ", member);
    else
      absent += cat(absent.empty() ? "" : "; ", whereabouts(member));
  }
  return cat(duration_text(timeout()), " (", options_.timeout_key, ") for ", operation,
             "; arrived: ", arrived.empty() ? "nobody" : arrived,
             "; not arrived: ", absent.empty() ? "nobody" : absent);
}

std::optional<std::string> World::in_vain(int rank, const std::string& operation,
                                          const std::vector<int>& members,
                                          const std::function<std::vector<int>()>& missing) const {
  std::vector<int> gone;
  for (const int member : members)
    if (left(member)) gone.push_back(member);
  if (gone.empty()) return std::nullopt;
  const auto absent = missing();
  for (const int other : gone)
    if (std::ranges::count(absent, other) > 0)
      return cat(operation, ": rank ", rank, " waits for rank ", other,
                 ", which has returned without joining");
  return std::nullopt;
}

int World::ranks_on_host(int rank) const {
  return int(std::ranges::count(members_.places, place(rank).host, &Place::host));
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
