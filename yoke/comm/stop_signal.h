// SPDX-License-Identifier: Apache-2.0
// A request from outside to save and leave: SIGTERM, SIGINT or SIGUSR1 sets a flag, and the ranks
// agree on it at a point of their choice, since a signal may reach one process only. A signal that
// comes because a peer died (mpirun sends SIGTERM then) is no such request: agreeing on it needs
// the peer, and ends in the error that names it. The second SIGINT has its usual effect, and
// so has a SIGTERM more than a second after another.
// Owns: the handlers, while it lives; one at a time in a process. Threads: all.
#pragma once

#include <array>
#include <csignal>

#include "yoke/comm/communicator.h"

namespace yoke::comm {

class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  int pending() const;  // what this process has got; 0: nothing
  // Collective: the highest number that any process of the group has got, for all the same.
  int agreed(const Communicator& comm) const;

 private:
  static constexpr std::array kSignals{SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace yoke::comm
