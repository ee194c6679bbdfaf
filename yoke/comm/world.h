// SPDX-License-Identifier: Apache-2.0
// What the ranks of one run share, whatever groups they form: the deadline of every wait, the
// flight recorder, and the first failure. A failure anywhere ends the whole world, because a rank
// that is gone from one group is missing in all of them. Threads: all.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/base/error.h"
#include "yoke/base/event_count.h"
#include "yoke/base/mutex.h"
#include "yoke/comm/operation.h"
#include "yoke/observe/flight_recorder.h"

namespace yoke::comm {

struct WorldOptions {
  Duration timeout = std::chrono::seconds(300);  // of every wait; a year at the most
  size_t flights_per_rank = 64;
  // Called by the issuing rank before each operation: a seam where tests delay or break a rank.
  std::function<void(int rank, OpKind kind)> before_issue = nullptr;
};

class World {
 public:
  World(int size, WorldOptions options);

  int size() const { return size_; }
  Duration timeout() const { return options_.timeout; }
  const WorldOptions& options() const { return options_; }
  observe::FlightRecorder& flights() { return flights_; }
  uint32_t next_group_id() { return next_group_++; }

  // The first call wins and wakes every wait; later ones change nothing. rank -1: nobody in
  // particular.
  void fail(int rank, Kind kind, const std::string& what);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Throws the first failure, if there is one, as `rank` should hear of it.
  void check(int rank) const {
    if (failed()) raise(rank);
  }
  [[noreturn]] void raise(int rank) const;

  struct Failure {
    int rank;
    Kind kind;
    std::string what;
    std::vector<std::string> others;  // what each other rank was doing at that moment
  };
  std::optional<Failure> failure() const;

  // A rank that has returned joins nothing any more; whoever needs it is told so at once.
  void leave(int rank);
  // "rank 2: all_reduce #17 on world, 4 MiB, waiting for 31 s", or that it has returned.
  std::string whereabouts(int rank) const;
  bool left(int rank) const { return left_[size_t(rank)].load(std::memory_order_acquire); }

  // Called once a failure or a departure has happened, until the token is dropped.
  std::shared_ptr<void> on_change(std::function<void()> wake);

 private:
  void wake_all();

  const int size_;
  const WorldOptions options_;
  SteadyClock clock_;
  observe::FlightRecorder flights_;
  std::atomic<uint32_t> next_group_{0};
  std::atomic<bool> failed_{false};
  std::vector<std::atomic<bool>> left_;
  mutable Mutex mutex_;
  std::optional<Failure> failure_ YOKE_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<std::function<void()>>> listeners_ YOKE_GUARDED_BY(mutex_);
};

}  // namespace yoke::comm
