// SPDX-License-Identifier: Apache-2.0
// Time as a value that is passed in, so that tests decide what time it is.
#pragma once

#include <atomic>
#include <chrono>

namespace yoke {

using Duration = std::chrono::nanoseconds;
using Time = std::chrono::time_point<std::chrono::steady_clock, Duration>;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Time now() const = 0;
};

// The machine's monotonic clock.
class SteadyClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now(); }
};

// Stands still until it is advanced. Threads: any thread may read or advance it.
class ManualClock final : public Clock {
 public:
  Time now() const override { return Time(Duration(ticks_.load())); }
  void advance(Duration by) { ticks_ += by.count(); }

 private:
  std::atomic<Duration::rep> ticks_{0};
};

}  // namespace yoke
