// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/loadable.h"

#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/models/whole.h"

namespace yoke::models {
namespace {

using std::filesystem::path;

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// The names of a zip file's parts.
std::vector<std::string> parts_of(const path& file) {
  try {
    caffe2::serialize::PyTorchStreamReader reader(file.string());
    return reader.getAllRecords();
  } catch (const std::exception& error) {
    fail(Kind::Io, "'", file.string(), "' is neither .pt nor .pt2: ", first_line(error));
  }
}

bool has_part(const std::vector<std::string>& parts, const std::string& text) {
  return std::ranges::any_of(parts, [&](const auto& part) { return part.find(text) != part.npos; });
}

class Script final : public Loadable {
 public:
  Script(const path& file, const LoadOptions& options)
      : Loadable(file.string()), module_(open_script(name_, options.device)) {
    module_.eval();
    for (auto& name : inputs_of(module_, name_)) inputs_.push_back({.name = std::move(name)});
    declared_ = !options.inputs.empty();
    if (!declared_) return;
    std::set<std::string> known;
    for (auto& input : inputs_) {
      known.insert(input.name);
      const auto told = std::ranges::find(options.inputs, input.name, &Port::name);
      if (told == options.inputs.end())
        fail(Kind::Usage, "forward() of '", name_, "' takes '", input.name,
             "', which no input was declared for");
      input = *told;
    }
    for (const auto& input : options.inputs)
      if (!known.contains(input.name))
        fail(Kind::Usage, "forward() of '", name_, "' takes no '", input.name, "'; it takes ",
             join({known.begin(), known.end()}, ", "));
    outputs_ = options.outputs;
  }

 private:
  std::vector<at::Tensor> compute(const std::vector<at::Tensor>& inputs) override {
    const c10::IValue result = module_.forward({inputs.begin(), inputs.end()});
    if (result.isTensor()) return {result.toTensor()};
    std::vector<at::Tensor> tensors;
    if (result.isTensorList()) return result.toTensorVector();
    if (result.isTuple())
      for (const auto& part : result.toTupleRef().elements())
        if (part.isTensor()) tensors.push_back(part.toTensor());
    if (tensors.empty())
      fail(Kind::Usage, "forward() of '", name_, "' gives ", result.tagKind(), ", not tensors");
    return tensors;
  }
  torch::jit::Module module_;
};

class Package final : public Loadable {
 public:
  Package(const path& file, const LoadOptions& options) : Loadable(file.string()) {
    if (options.inputs.empty())
      fail(Kind::Io, "'", name_,
           "' is compiled and checks no input itself: declare them, as x:FP32[-1,3,224,224]");
    inputs_ = options.inputs;
    outputs_ = options.outputs;
    using torch::inductor::AOTIModelPackageLoader;
    try {
      const auto metadata =
          AOTIModelPackageLoader::load_metadata_from_package(file.string(), "model");
      const auto made_for = metadata.find("AOTI_DEVICE_KEY");
      const std::string device = options.device.is_cuda() ? "cuda" : "cpu";
      if (made_for != metadata.end() && made_for->second != device)
        fail(Kind::Io, "it was compiled for ", made_for->second, ", and is to run on ", device,
             "; compile it there");
      loader_ = std::make_unique<AOTIModelPackageLoader>(
          file.string(), "model", /*run_single_threaded=*/false, /*num_runners=*/1,
          options.device.has_index() ? options.device.index() : c10::DeviceIndex(-1));
    } catch (const std::exception& error) {
      fail(Kind::Io, "'", name_, "' cannot be loaded: ", first_line(error));
    }
  }

 private:
  std::vector<at::Tensor> compute(const std::vector<at::Tensor>& inputs) override {
    return loader_->run(inputs);
  }
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

class Ours final : public Loadable {
 public:
  Ours(const path& folder, const LoadOptions& options)
      : Loadable(folder.string()), model_(open_model(folder).architecture, options.device) {
    inputs_ = {model_.model().input};
    outputs_ = {model_.model().output};
    declared_ = !inputs_[0].shape.empty();  // a module of TorchScript does not say
  }

 private:
  std::vector<at::Tensor> compute(const std::vector<at::Tensor>& inputs) override {
    return {model_.forward(inputs[0])};
  }
  const Whole model_;
};

}  // namespace

std::vector<at::Tensor> Loadable::run(const std::vector<at::Tensor>& inputs) {
  if (inputs.size() != inputs_.size())
    fail(Kind::Usage, "'", name_, "' takes ", inputs_.size(), " inputs, got ", inputs.size());
  if (declared_)
    for (size_t i = 0; i < inputs.size(); ++i) inputs_[i].check(inputs[i], "'" + name_ + "'");
  const c10::InferenceMode no_gradients;
  return compute(inputs);
}

std::unique_ptr<Loadable> open_loadable(const path& file, const LoadOptions& options) {
  if (!std::filesystem::exists(file)) fail(Kind::Io, "there is no '", file.string(), "'");
  if (std::filesystem::is_directory(file)) return std::make_unique<Ours>(file, options);
  const auto parts = parts_of(file);
  if (has_part(parts, "aotinductor/")) return std::make_unique<Package>(file, options);
  if (has_part(parts, "models/model.json") || has_part(parts, "serialized_exported_program.json"))
    fail(Kind::Io, "'", file.string(),
         "' is an export that is not compiled; in Python: torch._inductor.aoti_compile_and_package("
         "torch.export.load('",
         file.filename().string(), "'), package_path='compiled.pt2')");
  if (has_part(parts, "constants.pkl")) return std::make_unique<Script>(file, options);
  if (has_part(parts, "data.pkl"))
    fail(Kind::Io, "'", file.string(),
         "' has weights alone, without a program; save the module by "
         "torch.jit.script(module).save(path)");
  fail(Kind::Io, "'", file.string(), "' is neither TorchScript nor a compiled .pt2");
}

}  // namespace yoke::models
