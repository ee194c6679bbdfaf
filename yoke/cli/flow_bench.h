// SPDX-License-Identifier: Apache-2.0
// `yoke flow bench`: what the executor of a flow costs, next to what is ideal and to the usual way
// in Python; and how fast a flow of one's own is. Every value that comes out of a flow is verified.
#pragma once

#include <string>
#include <vector>

#include "yoke/cli/bench_data.h"
#include "yoke/cli/bench_table.h"
#include "yoke/cli/flow_file.h"
#include "yoke/flow/executor.h"

namespace yoke::cli {

// A flow that takes turns with others, as Turns wants it. What comes of the inputs, which rounds
// take in turn, must be as in `wanted`, to `tolerance`. A flow without inputs gives wanted[0].
// Every rank has one thread.
struct FlowOptions {
  flow::Tensors inputs = {}, wanted = {};
  bool pin = false;
  int under_way = 1;  // rounds at once
  double tolerance = 0;
};
class FlowRounds final : public Trainer {
 public:
  FlowRounds(const flow::Graph& graph, FlowOptions options);
  double round(int steps) override;
  size_t num_operations() const { return executor_.compiled().program.num_operations(); }

 private:
  const FlowOptions options_;
  flow::Executor executor_;
};

flow::Graph flow_on(const topo::Device& device, int ranks);  // all of them on it
int num_turns(const BenchTable& bench);

void bench_flow_peers(BenchTable& bench);
// On its own devices, and all of it on the first; both must give the same.
void bench_flow_file(BenchTable& bench, const FlowFile& file);

}  // namespace yoke::cli
