// SPDX-License-Identifier: Apache-2.0
// Runs this process's ranks of a world that a launcher has started: every process calls it with
// what topo::discover() found, and with the same function. They meet, form one world, numbered by
// process and then by rank thread, and the first failure or death anywhere ends it for all, as
// run_ranks does for threads. A process that is alone is run_ranks.
#pragma once

#include <functional>

#include "yoke/comm/run_ranks.h"
#include "yoke/comm/stop_signal.h"
#include "yoke/topo/launch.h"

namespace yoke::comm {

struct JoinOptions {
  RunOptions run = {};  // backend empty: local alone; nccl for GPUs; shm on one host
  int ranks = 1;  // of this process, each a thread; the number of run.devices if there are any
  Duration meet_timeout = std::chrono::seconds(300);  // for all processes to come
  const StopSignal* stop = nullptr;                   // ends that wait too, with Kind::Cancelled
};

void run_world(const topo::LaunchInfo& launch, const std::function<void(Communicator&)>& run,
               const JoinOptions& options = {});

}  // namespace yoke::comm
