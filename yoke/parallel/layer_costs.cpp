// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/layer_costs.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <limits>

#include "yoke/base/clock.h"

namespace yoke::parallel {

std::vector<double> measure_costs(const std::vector<LayerFactory>& layers, at::Tensor input,
                                  int repeats) {
  std::vector<double> costs;
  for (const auto& factory : layers) {
    const Layer layer = factory();
    double least = std::numeric_limits<double>::infinity();
    at::Tensor output;
    for (int repeat = 0; repeat < std::max(1, repeats); ++repeat) {
      const at::Tensor x = at::isFloatingType(input.scalar_type())
                               ? input.detach().clone().requires_grad_(true)
                               : input;
      const Time start = SteadyClock().now();
      output = layer.forward(x);
      if (output.requires_grad()) torch::autograd::backward({output}, {at::ones_like(output)});
      if (!output.is_cpu()) output.sum().item();  // waits for the device
      least = std::min(least, std::chrono::duration<double>(SteadyClock().now() - start).count());
    }
    costs.push_back(least);
    if (layer.module) layer.module->zero_grad();
    input = output.detach();
  }
  return costs;
}

}  // namespace yoke::parallel
