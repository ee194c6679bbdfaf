// SPDX-License-Identifier: Apache-2.0
// What the layers of a model cost, measured: for cutting it into stages.
#pragma once

#include <vector>

#include "yoke/parallel/pipeline.h"

namespace yoke::parallel {

// Seconds that each layer takes for forward and backward of this input, the least of several: for
// `layer_cost`, which wants one rank's on all (broadcast them). Makes one layer at a time.
std::vector<double> measure_costs(const std::vector<LayerFactory>& layers, at::Tensor input,
                                  int repeats = 3);

}  // namespace yoke::parallel
