// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/body.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/safetensors.h"
#include "yoke/models/loadable.h"
#include "yoke/models/script.h"

namespace yoke::flow {
namespace {

void flatten(const c10::IValue& value, const std::vector<std::string>& names, Tensors& out);

uint64_t bytes_of(const auto& tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

// Of a dictionary what bears the names of the node's outputs, or the one thing that is in it; of
// one within something else all, in its order.
void flatten_named(const c10::Dict<c10::IValue, c10::IValue>& values,
                   const std::vector<std::string>& names, Tensors& out) {
  std::vector<std::string> keys;
  for (const auto& item : values) keys.push_back(item.key().toStringRef());
  if (names.empty() || (keys.size() == 1 && names.size() == 1)) {
    for (const auto& item : values) flatten(item.value(), {}, out);
    return;
  }
  for (const auto& name : names) {
    const auto found = values.find(name);
    if (found == values.end())
      fail(Kind::Usage, "the model gives ", join(keys, ", "), ", and no '", name,
           "': name them in `output`");
    flatten(found->value(), {}, out);
  }
}

void flatten(const c10::IValue& value, const std::vector<std::string>& names, Tensors& out) {
  if (value.isTensor()) {
    out.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& item : value.toTupleRef().elements()) flatten(item, {}, out);
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) flatten(item, {}, out);
  } else if (value.isGenericDict()) {
    flatten_named(value.toGenericDict(), names, out);
  } else {
    fail(Kind::Usage, "the model gives ", value.tagKind(), ", and a node gives tensors");
  }
}

// Of a module of either kind. A parameter without gradients is kept as a buffer is.
void keep(Body& body, const auto& module) {
  for (const auto& weight : module.parameters())
    (weight.requires_grad() ? body.weights : body.buffers).push_back(weight);
  for (const auto& buffer : module.buffers()) body.buffers.push_back(buffer);
  body.bytes = bytes_of(body.state());
}

// "weight.0", "weight.1", "buffer.0", …
std::vector<std::pair<std::string, at::Tensor>> named(const Body& body) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t i = 0; i < body.weights.size(); ++i)
    result.emplace_back(cat("weight.", i), body.weights[i]);
  for (size_t i = 0; i < body.buffers.size(); ++i)
    result.emplace_back(cat("buffer.", i), body.buffers[i]);
  return result;
}

Body script(const std::string& path, at::Device device) {
  auto module = std::make_shared<torch::jit::Module>(models::open_script(path, device));
  const auto arguments = models::inputs_of(*module, path);
  Body body;
  keep(body, *module);
  const std::string code = module->dump_to_str(true, false, false);
  for (const char* drawing : {"dropout", "bernoulli", "torch.rand"})
    body.draws = body.draws || code.find(drawing) != code.npos;
  body.set_mode = [module](bool training) { module->train(training); };
  const auto names = std::make_shared<std::vector<std::string>>();
  body.name_outputs = [names](const std::vector<std::string>& given) { *names = given; };
  body.run = [module, path, names, count = arguments.size()](const Tensors& inputs, int64_t) {
    if (inputs.size() > count)
      fail(Kind::Usage, "'", path, "' takes ", count, " values, got ", inputs.size());
    Tensors out;
    flatten(module->forward({inputs.begin(), inputs.end()}), *names, out);
    return out;
  };
  return body;
}

}  // namespace

Tensors Body::state() const {
  Tensors all = weights;
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

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
  keep(body, *module);
  body.draws = std::ranges::any_of(module->modules(), [](const auto& part) {
    return part->name().find("Dropout") != std::string::npos;
  });
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
  const auto source = from.state(), target = to.state();
  for (size_t i = 0; i < source.size(); ++i) target[i].copy_(source[i]);
}

void save_weights(const Body& body, const std::string& path) {
  auto tensors = named(body);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach().cpu().contiguous();
  checkpoint::write_safetensors(path, tensors);
}

Open with_weights(Open open, std::string path) {
  return [=](at::Device device) {
    Body body = open(device);
    const checkpoint::SafetensorsFile file(path);
    const torch::NoGradGuard no_grad;
    const auto tensors = named(body);
    for (const auto& [name, tensor] : tensors) {
      if (!file.has(name) || file.tensor(name).sizes() != tensor.sizes())
        fail(Kind::Io, "'", path, "' is of another model: ", name, " is ",
             file.has(name) ? cat(file.tensor(name).sizes()) : "missing", ", wanted ",
             cat(tensor.sizes()));
      at::Tensor(tensor).copy_(file.tensor(name));
    }
    if (file.names().size() != tensors.size())
      fail(Kind::Io, "'", path, "' has ", file.names().size(),
           " weights and buffers, and the model ", tensors.size());
    return body;
  };
}

}  // namespace yoke::flow
