// SPDX-License-Identifier: Apache-2.0
// `yoke bench pipeline` and `yoke bench tensor`: how near a pipeline comes to what the simulator
// says, and training steps next to PyTorch's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "yoke/cli/bench_data.h"
#include "yoke/plan/simulate.h"

namespace CLI {
class App;
}

namespace yoke::cli {

void add_bench_mesh(CLI::App& bench);  // the two verbs

// A pipeline whose layers sleep instead of computing.
struct StandIn {
  plan::Schedule schedule = {};
  plan::Times times = {};  // milliseconds, of a rank's whole share
};
// Milliseconds of a step, the least of several.
double run_stand_in(const StandIn& stand_in, int steps);

// The gpt of bench/peers with 8 blocks and a head of its own, in micro-batches of 256 tokens.
struct PipelineBench {
  std::string schedule = "1f1b";
  int ranks = 2;
  int micro_batches = 8;
};
class PipelineTrainer : public Trainer {
 public:
  // What the ranks did in the last step of the last round, in ms from its start.
  virtual const plan::Simulation& measured() const = 0;
  virtual const plan::Schedule& schedule() const = 0;
};
std::unique_ptr<PipelineTrainer> make_pipeline_trainer(const PipelineBench& bench);
// The mean time of F, I and W in what was measured, by stage: what the simulator is to be asked.
plan::Costs costs_of(const plan::Schedule& schedule, const plan::Simulation& measured);

// The same with 4 blocks, and 4 x 256 tokens, over `ranks` ranks of one layer.
std::unique_ptr<Trainer> make_tensor_trainer(int ranks, bool sequence);

}  // namespace yoke::cli
