// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/body.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/safetensors.h"
#include "yoke/models/loadable.h"
#include "yoke/models/script.h"

namespace yoke::flow {
namespace {

uint64_t bytes_of(const auto& tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

void flatten(const c10::IValue& value, Tensors& out) {
  if (value.isTensor()) {
    out.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& item : value.toTupleRef().elements()) flatten(item, out);
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) flatten(item, out);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) flatten(item.value(), out);
  } else {
    fail(Kind::Usage, "the model gives ", value.tagKind(), ", and a node gives tensors");
  }
}

Tensors flat(const c10::IValue& value) {
  Tensors out;
  flatten(value, out);
  return out;
}

Body script(const std::string& path, at::Device device) {
  auto module = std::make_shared<torch::jit::Module>(models::open_script(path, device));
  const auto arguments = models::inputs_of(*module, path);
  Body body;
  for (const auto& weight : module->parameters())
    if (weight.requires_grad()) body.weights.push_back(weight);
  body.bytes = bytes_of(module->parameters()) + bytes_of(module->buffers());
  body.set_mode = [module](bool training) { module->train(training); };
  body.run = [module, path, count = arguments.size()](const Tensors& inputs, int64_t) {
    if (inputs.size() > count)
      fail(Kind::Usage, "'", path, "' takes ", count, " values, got ", inputs.size());
    return flat(module->forward({inputs.begin(), inputs.end()}));
  };
  return body;
}

}  // namespace

Open function(Function run) {
  return [run = std::move(run)](at::Device) { return Body{.run = run}; };
}

Open function(std::function<at::Tensor(const Tensors&)> run) {
  return function(Function(
      [run = std::move(run)](const Tensors& inputs, int64_t) -> Tensors { return {run(inputs)}; }));
}

Body body_of(std::shared_ptr<torch::nn::Module> module, Function run, at::Device device) {
  module->to(device);
  Body body{.run = std::move(run),
            .set_mode = [module](bool training) { module->train(training); }};
  for (const auto& weight : module->parameters())
    if (weight.requires_grad()) body.weights.push_back(weight);
  body.bytes = bytes_of(module->parameters()) + bytes_of(module->buffers());
  return body;
}

Open file(std::string path, std::vector<plan::Port> inputs, std::vector<plan::Port> outputs) {
  return [=](at::Device device) -> Body {
    const auto kind = models::kind_of(path);
    if (kind == models::FileKind::Script) return script(path, device);
    const bool package = kind == models::FileKind::Package;
    const std::shared_ptr<models::Loadable> loaded =
        models::open_loadable(path, {.device = device, .inputs = inputs, .outputs = outputs});
    Body body{.compiled = package,
              .without_gradients = package ? cat("'", path, "' is a compiled .pt2")
                                           : cat("'", path, "' is opened to be used, not trained"),
              .inputs = loaded->inputs(),
              .outputs = loaded->outputs(),
              .bytes = loaded->bytes()};
    body.run = [loaded](const Tensors& values, int64_t) {
      const torch::NoGradGuard no_grad;
      return loaded->run(values);
    };
    return body;
  };
}

void copy_weights(const Body& from, const Body& to) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < from.weights.size(); ++i) to.weights[i].copy_(from.weights[i]);
}

void save_weights(const Tensors& weights, const std::string& path) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (size_t i = 0; i < weights.size(); ++i)
    named.emplace_back(cat("weight.", i), weights[i].detach().cpu().contiguous());
  checkpoint::write_safetensors(path, named);
}

Open with_weights(Open open, std::string path) {
  return [=](at::Device device) {
    Body body = open(device);
    const checkpoint::SafetensorsFile file(path);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < body.weights.size(); ++i) {
      const std::string name = cat("weight.", i);
      if (!file.has(name) || file.tensor(name).sizes() != body.weights[i].sizes())
        fail(Kind::Io, "'", path, "' is of another model: ", name, " is ",
             file.has(name) ? cat(file.tensor(name).sizes()) : "missing", ", wanted ",
             cat(body.weights[i].sizes()));
      body.weights[i].copy_(file.tensor(name));
    }
    if (file.names().size() != body.weights.size())
      fail(Kind::Io, "'", path, "' has ", file.names().size(), " weights, and the model ",
           body.weights.size());
    return body;
  };
}

}  // namespace yoke::flow
