// SPDX-License-Identifier: Apache-2.0
// `yoke demo`: a small network trained on several ranks and again on one, to see that it works
// here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "yoke/comm/run_ranks.h"
#include "yoke/observe/trace.h"

namespace CLI {
class App;
}

namespace yoke::cli {

void add_demo(CLI::App& app);

struct DemoRun {
  std::vector<topo::Device> devices = {};
  int steps = 100;
  observe::Tracer* tracer = nullptr;
  std::function<void(int step, double loss, double grad_norm)> on_step = nullptr;  // by rank 0
  comm::RunOptions ranks = {};
};

// Trains by data parallelism on one rank for each device; the loss of every step, of the whole
// batch.
std::vector<double> train_demo(const DemoRun& run);

}  // namespace yoke::cli
