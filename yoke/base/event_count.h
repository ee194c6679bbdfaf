// SPDX-License-Identifier: Apache-2.0
// Lets threads sleep until "something changed", with a deadline, at the price of one atomic read
// for a waiter that need not sleep and one atomic increment for a notifier that nobody awaits.
//
//   while (!condition()) {            condition is made of atomics that the notifier sets
//     const auto seen = event.key();  before notify_all()
//     if (condition()) break;
//     event.wait(seen, until);
//   }
// Threads: all. Placed in shared memory it works between processes (a futex underneath).
#pragma once

#include <atomic>
#include <cstdint>

#include "yoke/base/clock.h"

namespace yoke {

class EventCount {
 public:
  uint32_t key() const;
  // Sleeps until notify_all() is called after key() gave `seen`, or until `deadline`. May wake
  // early.
  void wait(uint32_t seen, Time deadline);
  void notify_all();

 private:
  std::atomic<uint32_t> word_{0};  // how often it was notified, times two, and the bit of sleepers
};

}  // namespace yoke
