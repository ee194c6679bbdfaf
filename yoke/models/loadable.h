// SPDX-License-Identifier: Apache-2.0
// Any file of a model as one thing that is called: TorchScript (.pt), AOTInductor's package (.pt2),
// a checkpoint or run of ours, a Hugging Face folder. What it takes and gives has names, and is
// checked first: a compiled package reads past a short input. To have it check as well, the first
// one that is opened sets AOTI_RUNTIME_CHECK_INPUTS unless it is set: a program whose threads read
// the environment meanwhile sets it at its start. Model files are programs: open those alone whose
// origin you trust. Threads: one at a time.
#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>
#include <map>
#include <memory>

#include "yoke/models/port.h"

namespace yoke::models {

struct LoadOptions {
  at::Device device = at::kCPU;
  // What a file does not say itself: .pt knows names alone, and .pt2 must be told.
  std::vector<Port> inputs = {}, outputs = {};
  at::ScalarType dtype = at::kFloat;  // other than that: floating weights become it
};

class Whole;

class Loadable {
 public:
  virtual ~Loadable() = default;
  const std::string& platform() const { return platform_; }  // "pytorch_torchscript"
  const std::vector<Port>& inputs() const { return inputs_; }
  const std::vector<Port>& outputs() const { return outputs_; }  // empty: it does not say
  const std::string& name() const { return name_; }
  // Whether shapes and types of the inputs are known; else only their number is.
  bool declared() const { return declared_; }
  uint64_t bytes() const { return bytes_; }  // of weights
  // In the order of inputs(); without gradients. Throws Kind::Usage with what was got and wanted.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  // The same unchecked, and values as TorchScript has them: a list of strings is Type::Bytes. An
  // argument that is a number takes the one element of its tensor.
  virtual c10::IValue call(std::vector<c10::IValue> inputs) = 0;

  // Of a module of TorchScript: what it may change in a call, and whether forward() may: it sets
  // attributes, or writes into what lies in them.
  virtual std::vector<c10::IValue> state() const { return {}; }
  virtual bool sets_state() const { return false; }
  // Another with the state that it has now, and the same weights; null: there is none to be had.
  virtual std::unique_ptr<Loadable> copy() const { return nullptr; }
  virtual const Whole* whole() const { return nullptr; }  // of ours

 protected:
  Loadable(std::string name, std::string platform)
      : name_(std::move(name)), platform_(std::move(platform)) {}
  Loadable(const Loadable&) = default;
  std::string name_, platform_;
  std::vector<Port> inputs_ = {}, outputs_ = {};
  bool declared_ = true;
  uint64_t bytes_ = 0;
};

enum class FileKind { Script, Package, Folder };
// Throws Kind::Io with what the file is and what to do.
FileKind kind_of(const std::filesystem::path& path);
// What the compiler wrote into a package, as AOTI_DEVICE_KEY.
std::map<std::string, std::string> package_metadata(const std::filesystem::path& path);
// Throws Kind::Io with what the file is and what to do.
std::unique_ptr<Loadable> open_loadable(const std::filesystem::path& path,
                                        const LoadOptions& options = {});

}  // namespace yoke::models
