// SPDX-License-Identifier: Apache-2.0
// A module file of TorchScript as a model to be trained: one layer, under data parallelism and ZeRO
// 0 to 3. Its forward takes the samples and gives an output, whose loss is the cross entropy where
// targets are class numbers and the mean squared distance where they are not; or it takes samples
// and targets and gives the mean loss. The graph optimiser is off: it holds back gradients.
#pragma once

#include "yoke/models/model.h"

namespace c10 {
struct Argument;
}
namespace torch::jit {
struct Module;
}

namespace yoke::models {

struct ScriptOptions {
  std::string path = {};
  at::Device device = at::kCPU;
  Init init = nullptr;  // else the file's
};

// Throws Kind::Io where it is no such file, or forward takes something else.
Model make_script(const ScriptOptions& options);

// For whoever opens such a file: the module, and what its forward must be given. Throw Kind::Io.
torch::jit::Module open_script(const std::string& path, at::Device device);
torch::jit::Module open_script(const ScriptOptions& options);  // with the weights of `init`
std::vector<c10::Argument> inputs_of(const torch::jit::Module& module, const std::string& path);

}  // namespace yoke::models
