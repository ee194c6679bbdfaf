// SPDX-License-Identifier: Apache-2.0
// Shows on stderr what every rank is doing: on SIGUSR2, and when a run fails. Give on_world() to
// run_ranks. Owns: a thread that waits for the signal. One at a time in a process.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "yoke/base/mutex.h"
#include "yoke/comm/world.h"

namespace yoke::cli {

class FlightWatch {
 public:
  // To be called by main() first: every thread inherits it, so only the watch hears the signal.
  static void block_signal();

  FlightWatch();
  std::function<void(std::shared_ptr<comm::World>)> on_world();
  // The table of the last run's operations, to stderr.
  void dump() const;

 private:
  void listen(const std::stop_token& stop) const;

  mutable Mutex mutex_;
  std::shared_ptr<comm::World> world_ YOKE_GUARDED_BY(mutex_);
  std::jthread listener_;
};

}  // namespace yoke::cli
