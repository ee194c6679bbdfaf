// SPDX-License-Identifier: Apache-2.0
// Runs a function on n ranks, each a thread of this process, over the local backend unless another
// is given. The CPU ranks
// divide the cores among them; a rank with a CUDA device has it as its current device, with a
// stream of its own as the current stream. The first rank that fails ends the world: its peers wake
// at once, and when all have returned run_ranks throws that rank's error, with what the others were
// doing. Every wait ends after RunOptions::world.timeout, five minutes unless set.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "yoke/comm/backend_factory.h"

namespace yoke::comm {

struct RunOptions {
  WorldOptions world = {};
  BackendFactory backend = {};             // empty: local
  std::vector<topo::Device> devices = {};  // one for each rank; empty: all on the CPU
  int threads_per_rank = 0;                // of LibTorch; 0: the cores divided by the ranks
  bool pin = false;  // keep each rank on cores of its own, where there are enough for all
  // Given the world before the first rank starts, for those who want to see its flight recorder.
  std::function<void(std::shared_ptr<World>)> on_world = nullptr;
};

void run_ranks(int num_ranks, const std::function<void(Communicator&)>& run,
               const RunOptions& options = {});

namespace detail {

// The part of it for a world that exists: runs this process's ranks, and throws as run_ranks does.
void run_here(const std::shared_ptr<World>& world, const std::function<void(Communicator&)>& run,
              const RunOptions& options);

}  // namespace detail

}  // namespace yoke::comm
