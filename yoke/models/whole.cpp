// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/whole.h"

#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <filesystem>
#include <memory>

#include "yoke/base/error.h"

namespace yoke::models {
namespace {

Architecture placed(Architecture architecture, at::Device device, at::ScalarType dtype) {
  std::visit(
      [&](auto& options) {
        options.device = device;
        if constexpr (requires { options.dtype; }) options.dtype = dtype;
      },
      architecture);
  return architecture;
}

}  // namespace

Opened open_model(const checkpoint::Path& path) {
  if (!std::filesystem::exists(path)) fail(Kind::Io, "there is no '", path.string(), "'");
  if (std::filesystem::exists(path / "config.json"))
    return {.architecture = as_architecture(read_hugging_face(path, /*mapped=*/true)),
            .folder = path};
  const auto folder = checkpoint::find(path).back();
  const auto saved = std::make_shared<const checkpoint::Saved>(folder);
  Opened opened{.values = saved->values(), .folder = folder};
  opened.architecture = parse_architecture(saved->value("architecture"), folder.string());
  std::visit(
      [&](auto& options) {
        options.init = [saved](const std::string& name) { return saved->whole("model/" + name); };
      },
      opened.architecture);
  return opened;
}

Whole::Whole(Architecture architecture, at::Device device, at::ScalarType dtype)
    : architecture_(placed(std::move(architecture), device, dtype)),
      model_(make_model(architecture_)),
      dtype_(std::holds_alternative<ScriptOptions>(architecture_) ? std::nullopt
                                                                  : std::optional(dtype)) {
  for (const auto& make : model_.layers({})) {
    layers_.push_back(make());
    const auto& module = layers_.back().module;
    if (!module) continue;
    module->eval();
    // GPT-2's files have matrices the other way round, which one token is slow with.
    for (auto& parameter : module->parameters())
      if (!parameter.is_contiguous()) parameter.set_data(parameter.contiguous());
  }
}

at::Tensor Whole::forward(const at::Tensor& input) const {
  const c10::InferenceMode no_gradients;
  at::Tensor x = dtype_ && at::isFloatingType(input.scalar_type()) ? input.to(*dtype_) : input;
  for (const auto& layer : layers_) x = layer.forward(x);
  return x;
}

at::Tensor Whole::forward_last(const at::Tensor& input) const {
  const c10::InferenceMode no_gradients;
  at::Tensor x = input;
  for (size_t i = 0; i + 1 < layers_.size(); ++i) x = layers_[i].forward(x);
  return layers_.back().forward(x.narrow(1, x.size(1) - 1, 1)).select(1, 0);
}

}  // namespace yoke::models
