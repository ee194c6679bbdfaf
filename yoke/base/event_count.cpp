// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/event_count.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace yoke {

namespace {

constexpr uint32_t kSleeper = 1;  // the lowest bit: somebody sleeps, or is about to

}  // namespace

uint32_t EventCount::key() const { return word_.load() & ~kSleeper; }

void EventCount::wait(uint32_t seen, Time deadline) {
  uint32_t now = seen;
  if (!word_.compare_exchange_strong(now, seen | kSleeper) && now != (seen | kSleeper)) return;
  const int64_t ns = deadline.time_since_epoch().count();
  // steady_clock is CLOCK_MONOTONIC, which is what FUTEX_WAIT_BITSET takes as an absolute time.
  timespec until{.tv_sec = time_t(ns / 1'000'000'000), .tv_nsec = long(ns % 1'000'000'000)};
  syscall(SYS_futex, &word_, FUTEX_WAIT_BITSET, seen | kSleeper, &until, nullptr,
          FUTEX_BITSET_MATCH_ANY);
}

// The step and whether somebody sleeps change as one: nobody falls asleep between the two unseen,
// and nobody is woken twice.
void EventCount::notify_all() {
  uint32_t before = word_.load();
  while (!word_.compare_exchange_weak(before, (before & ~kSleeper) + 2)) {
  }
  if (before & kSleeper) syscall(SYS_futex, &word_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace yoke
