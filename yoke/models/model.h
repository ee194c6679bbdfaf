// SPDX-License-Identifier: Apache-2.0
// A model for whoever trains it: layers, loss and cost. A user's own is made the same way; one that
// is not a sequence is one layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "yoke/models/port.h"
#include "yoke/parallel/parallelize.h"

namespace yoke::models {

struct Model {
  parallel::LayersOnAxis layers = nullptr;
  std::vector<std::vector<std::string>> ties = {};  // parameters that are one (PipelineOptions)
  // The sum over the samples or tokens of a micro-batch, whose number is target.size(0) x tokens.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target,
                           const parallel::TensorAxis& axis)>
      loss_sum = nullptr;
  // How many of them are guessed right, of a model that guesses; else empty, or no number.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> num_right = nullptr;
  int64_t tokens = 1;              // of a sample; the loss is a mean over them
  int64_t num_parameters = 0;      // each once
  double flops = 0;                // of forward and backward of one token
  std::vector<double> costs = {};  // of the layers, relative; empty: each as much as the next
  // What tensor parallelism cuts: how many there are, and of what.
  std::vector<std::pair<int64_t, std::string>> cut = {};
  std::string why_whole = {};    // why tensor parallelism cannot cut it; empty: it can
  bool wants_target = false;     // layers look at Passing::target
  bool can_scatter = false;      // it knows tokens that are elsewhere (sequence parallelism)
  at::Device device = at::kCPU;  // of its layers
  Port input = {}, output = {};
};

// Gives a parameter or buffer its first value, by its name, which begins with the place of its
// layer. Empty: they are drawn.
using Init = std::function<at::Tensor(const std::string& name)>;

// Draws normal numbers by name and element, times `scale`; 0 gives zeros.
void draw(at::Tensor parameter, uint64_t seed, const std::string& name, double scale);

// The scale of a parameter by its name in the layer; below 0: it stays as it is.
using Scale = std::function<double(const std::string& key)>;
inline bool is_norm(const std::string& key) { return key.find("norm") != key.npos; }
// First values of all that a layer has. `name_of`: under which name it is drawn or given.
void fill(torch::nn::Module& module, const Init& init, uint64_t seed, const Scale& scale,
          const std::function<std::string(const std::string& key)>& name_of);

// The same for the module of a layer, put where it is to be.
template <typename Module, typename Options>
std::shared_ptr<Module> placed(std::shared_ptr<Module> module, const Options& options,
                               int64_t place, const Scale& scale) {
  fill(*module, options.init, options.seed, scale,
       [&](const std::string& key) { return std::to_string(place) + "." + key; });
  module->to(options.device, options.dtype);
  return module;
}

// A model that sorts samples into classes: [batch, classes] from its layers.
Model classifier(int64_t classes, at::Device device);

}  // namespace yoke::models
