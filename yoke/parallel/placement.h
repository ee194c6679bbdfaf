// SPDX-License-Identifier: Apache-2.0
// A model whose parts lie on devices of the user's choice, used as any module is: forward, backward
// and an optimizer of LibTorch's on its parameters. In series one device computes while the others
// wait; side by side all branches compute at the same time, backward too.
//
//   const std::vector<Placed> parts = {{layer(first), at::Device("cuda:0")}, ...};
//   const Layer model = in_series(parts);
//   model.forward(x).sum().backward();
//
// The same parts as a pipeline, where no device waits for long, is another word:
// run_pipeline(parts, "1f1b", ...) instead of run_pipeline(parts, "layer", ...).
#pragma once

#include "yoke/parallel/pipeline.h"

namespace yoke::parallel {

struct Placed {
  Layer layer = {};
  at::Device device = at::kCPU;
};

// The parts' modules are moved to their devices, and what is computed goes with them. The result's
// module has them under the names 0, 1, ...
Layer in_series(const std::vector<Placed>& parts);
// Every branch gets the input, on the CPU each on a thread of its own; `join` makes one tensor of
// what they give, on the device of the first. Under DataParallel, which wants one thread, CPU
// branches come one after the other.
Layer side_by_side(const std::vector<Placed>& branches,
                   std::function<at::Tensor(const std::vector<at::Tensor>&)> join);

// Runs `train` on a thread for each rank, with the parts as the stages of a schedule by its name.
// Afterwards they have what was learnt.
void run_pipeline(const std::vector<Placed>& parts, const std::string& schedule, int micro_batches,
                  const std::function<void(Pipeline&)>& train, const PipelineOptions& options = {});

}  // namespace yoke::parallel
