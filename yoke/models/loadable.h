// SPDX-License-Identifier: Apache-2.0
// Any file of a model as one thing that is called: TorchScript (.pt), AOTInductor's package (.pt2),
// a checkpoint or run of ours, a Hugging Face folder. What it takes and gives has names, and is
// checked first: a compiled package checks nothing itself and reads past a short input. Model files
// are programs: open those alone whose origin you trust. Threads: run() one at a time.
#pragma once

#include <filesystem>
#include <memory>

#include "yoke/models/port.h"

namespace yoke::models {

struct LoadOptions {
  at::Device device = at::kCPU;
  // What a file does not say itself: .pt knows names alone, and .pt2 must be told.
  std::vector<Port> inputs = {}, outputs = {};
};

class Loadable {
 public:
  virtual ~Loadable() = default;
  const std::vector<Port>& inputs() const { return inputs_; }
  const std::vector<Port>& outputs() const { return outputs_; }  // empty: it does not say
  const std::string& name() const { return name_; }
  // Whether shapes and types of the inputs are known; else only their number is.
  bool declared() const { return declared_; }
  // In the order of inputs(); without gradients. Throws Kind::Usage with what was got and wanted.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

 protected:
  explicit Loadable(std::string name) : name_(std::move(name)) {}
  virtual std::vector<at::Tensor> compute(const std::vector<at::Tensor>& inputs) = 0;
  std::string name_;
  std::vector<Port> inputs_ = {}, outputs_ = {};
  bool declared_ = true;
};

// Throws Kind::Io with what the file is and what to do.
std::unique_ptr<Loadable> open_loadable(const std::filesystem::path& path,
                                        const LoadOptions& options = {});

}  // namespace yoke::models
