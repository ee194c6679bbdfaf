// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/script.h"

#include <ATen/Functions.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/module.h>

#include <cmath>
#include <filesystem>

#include "yoke/base/error.h"
#include "yoke/parallel/cross_entropy.h"
#include "yoke/parallel/passing.h"

namespace yoke::models {
namespace {

using namespace parallel;

// The module's tensors under the names they have there: data parallelism then sees them.
struct Script : torch::nn::Module {
  explicit Script(torch::jit::Module given, size_t inputs)
      : module(std::move(given)), num_inputs(inputs) {
    module.train(true);  // it may have been saved for use
    copy(module, *this);
  }
  static void copy(const torch::jit::Module& from, torch::nn::Module& to) {
    for (const auto& item : from.named_parameters(/*recurse=*/false))
      to.register_parameter(item.name, item.value, item.value.requires_grad());
    for (const auto& item : from.named_buffers(/*recurse=*/false))
      to.register_buffer(item.name, item.value);
    for (const auto& item : from.named_children()) {
      const auto child = std::make_shared<Names>();
      copy(item.value, *child);
      to.register_module(item.name, child);
    }
  }
  struct Names : torch::nn::Module {};

  void train(bool on = true) override {
    torch::nn::Module::train(on);
    module.train(on);
  }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<c10::IValue> inputs{x};
    if (num_inputs == 2) {
      const at::Tensor& target = Passing::current().target;
      if (!target.defined())
        fail(Kind::Usage, "forward() of this module wants targets, and there are none");
      inputs.emplace_back(target);
    }
    const c10::IValue output = module.forward(std::move(inputs));
    if (!output.isTensor())
      fail(Kind::Usage, "forward() of the module gives ", output.tagKind(),
           ", and a model that is trained gives one tensor");
    return output.toTensor();
  }
  torch::jit::Module module;
  const size_t num_inputs;
};

std::shared_ptr<Script> filled(const ScriptOptions& options, size_t inputs) {
  const auto script = std::make_shared<Script>(open_script(options.path, options.device), inputs);
  if (options.init)
    fill(*script, options.init, 0, nullptr, [](const std::string& key) { return "0." + key; });
  return script;
}

}  // namespace

torch::jit::Module open_script(const ScriptOptions& options) { return filled(options, 1)->module; }

torch::jit::Module open_script(const std::string& path, at::Device device) {
  if (!std::filesystem::exists(path))
    fail(Kind::Io, "there is no '", path, "'; give a file that torch.jit.save has written");
  try {
    return torch::jit::load(path, device);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    fail(Kind::Io, "'", path, "' is no TorchScript module: ", text.substr(0, text.find('\n')),
         "; write one by torch.jit.script(module).save(path)");
  }
}

std::vector<c10::Argument> inputs_of(const torch::jit::Module& module, const std::string& path) {
  const auto method = module.find_method("forward");
  if (!method) fail(Kind::Io, "the module in '", path, "' has no forward()");
  std::vector<c10::Argument> inputs;
  const auto& arguments = method->function().getSchema().arguments();
  for (size_t i = 1; i < arguments.size(); ++i)  // the first is the module, whatever its name
    if (!arguments[i].default_value()) inputs.push_back(arguments[i]);
  return inputs;
}

Model make_script(const ScriptOptions& options) {
  const auto first = open_script(options.path, at::kCPU);
  const auto arguments = inputs_of(first, options.path);
  for (const auto& argument : arguments)
    if (argument.type()->kind() != c10::TypeKind::TensorType)
      fail(Kind::Io, "forward() of '", options.path, "' takes ", argument.type()->str(), " as '",
           argument.name(), "', and tensors alone can be given");
  const size_t inputs = arguments.size();
  if (inputs < 1 || inputs > 2)
    fail(Kind::Io, "forward() of '", options.path, "' takes ", inputs,
         " arguments; to be trained it takes the samples, or samples and targets");
  Model model{.device = options.device};
  model.wants_target = inputs == 2;
  model.why_whole = "the layers of a TorchScript module are not ours to cut";
  for (const auto& parameter : first.parameters()) model.num_parameters += parameter.numel();
  model.flops = 6.0 * double(model.num_parameters);
  model.input = {.name = "x"};
  model.output = {.name = "y"};
  model.layers = [options, inputs](const TensorAxis&) {
    return std::vector<LayerFactory>{[=] {
      torch::jit::setGraphExecutorOptimize(false);
      return layer(filled(options, inputs));
    }};
  };
  model.loss_sum = [inputs](const at::Tensor& output, const at::Tensor& target, const TensorAxis&) {
    if (inputs == 2) return output.mean() * target.size(0);
    if (at::isFloatingType(target.scalar_type()))
      return (output - target).square().flatten(1).mean(1).sum();
    // A sample counts once, however many tokens it has.
    return cross_entropy_sum(output.reshape({-1, output.size(-1)}), target.reshape({-1})) /
           (double(target.numel()) / double(target.size(0)));
  };
  if (inputs == 1)
    model.num_right = [](const at::Tensor& output, const at::Tensor& target) {
      if (at::isFloatingType(target.scalar_type()))
        return at::full({}, NAN, target.options().dtype(at::kDouble));  // there is nothing to guess
      return (output.argmax(-1) == target).to(at::kDouble).sum() /
             (double(target.numel()) / double(target.size(0)));
    };
  return model;
}

}  // namespace yoke::models
