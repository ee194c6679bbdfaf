// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/event_count.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace yoke {

void EventCount::wait(uint32_t seen, Time deadline) {
  const int64_t ns = deadline.time_since_epoch().count();
  // steady_clock is CLOCK_MONOTONIC, which is what FUTEX_WAIT_BITSET takes as an absolute time.
  timespec until{.tv_sec = time_t(ns / 1'000'000'000), .tv_nsec = long(ns % 1'000'000'000)};
  sleepers_.fetch_add(1);
  syscall(SYS_futex, &epoch_, FUTEX_WAIT_BITSET, seen, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  sleepers_.fetch_sub(1);
}

void EventCount::notify_all() {
  epoch_.fetch_add(1);
  if (sleepers_.load() > 0) syscall(SYS_futex, &epoch_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace yoke
