// SPDX-License-Identifier: Apache-2.0
// A model for whoever trains it: layers, loss and cost. A user's own is made the same way; one that
// is not a sequence is one layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "yoke/parallel/parallelize.h"

namespace yoke::models {

struct Model {
  parallel::LayersOnAxis layers = nullptr;
  std::vector<std::vector<std::string>> ties = {};  // parameters that are one (PipelineOptions)
  // The sum over the samples or tokens of a micro-batch, whose number is target.size(0) x tokens.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target,
                           const parallel::TensorAxis& axis)>
      loss_sum = nullptr;
  int64_t tokens = 1;              // of a sample; the loss is a mean over them
  int64_t num_parameters = 0;      // each once
  double flops = 0;                // of forward and backward of one token
  std::vector<double> costs = {};  // of the layers, relative; empty: each as much as the next
  // What tensor parallelism cuts: how many there are, and of what.
  std::vector<std::pair<int64_t, std::string>> cut = {};
  bool can_scatter = false;      // it knows tokens that are elsewhere (sequence parallelism)
  at::Device device = at::kCPU;  // of its layers
};

// Gives a parameter its first values, by its name. Empty: they are drawn.
using Init = std::function<at::Tensor(const std::string& name)>;

// Names of parameters begin with the place of their layer. Draws normal numbers by name and
// element, times `scale`; 0 gives zeros.
void draw(at::Tensor parameter, uint64_t seed, const std::string& name, double scale);

}  // namespace yoke::models
