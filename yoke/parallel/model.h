// SPDX-License-Identifier: Apache-2.0
// A model as data parallelism sees it: named parameters and buffers, each stored once.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "yoke/comm/communicator.h"
#include "yoke/plan/layout.h"

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace yoke::parallel {

// A parameter under its first name. Tied weights are one parameter: usually one tensor under two
// names, in TorchScript two tensors over one memory, and then the gradient is the sum of both's.
struct ModelParameter {
  std::string name = {};
  std::vector<at::Tensor> leaves = {};
  const at::Tensor& tensor() const { return leaves[0]; }
};

bool same_memory(const at::Tensor& a, const at::Tensor& b);
void add_leaf(ModelParameter& parameter, const at::Tensor& leaf);  // once

struct Model {
  std::vector<ModelParameter> trainable = {};  // in the order of registration
  std::vector<ModelParameter> frozen = {};     // not trained, and buffers
};

Model model_of(const torch::nn::Module& module);
Model model_of(const torch::jit::Module& module);

std::vector<plan::Parameter> parameters_of(const Model& model);
// Collective: throws on the ranks whose names, shapes or dtypes are not rank 0's, and says where.
void compare_models(const Model& model, const comm::Communicator& comm, at::Device device);

}  // namespace yoke::parallel
