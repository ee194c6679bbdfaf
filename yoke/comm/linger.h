// SPDX-License-Identifier: Apache-2.0
// What a rank does before it sleeps: it spins for a moment, since a peer may be about to come, and
// then yields, since the peer may share its core.
#pragma once

#include <thread>

#include "yoke/base/clock.h"

namespace yoke::comm {

inline bool more_than_cores(int ranks) {
  static const int kCores = int(std::thread::hardware_concurrency());
  return ranks > kCores;
}

// True as soon as there are news. `crowded`: ranks share cores, so that spinning helps nobody.
template <typename News>
bool linger(bool crowded, News news) {
  using namespace std::chrono_literals;
  constexpr Duration kSpin = 4us, kYield = 50us;
  const Time start = SteadyClock().now();
  Duration waited{0};
  while (waited < (crowded ? kSpin : kYield)) {
    for (int i = 0; i < 16; ++i) {
      if (news()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    if (crowded || waited > kSpin) std::this_thread::yield();
    waited = SteadyClock().now() - start;
  }
  return false;
}

}  // namespace yoke::comm
