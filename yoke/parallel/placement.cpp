// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/placement.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/autocast.h"
#include "yoke/parallel/touch.h"
#include "yoke/parallel/workers.h"
#include "yoke/plan/generate.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::shared_ptr<torch::nn::Module> gather_modules(const std::vector<Placed>& parts) {
  if (parts.empty()) fail(Kind::Usage, "a model wants at least one part");
  auto whole = std::make_shared<torch::nn::Module>();
  for (size_t i = 0; i < parts.size(); ++i)
    if (const auto& module = parts[i].layer.module) {
      module->to(parts[i].device);
      whole->register_module(std::to_string(i), module);
    }
  return whole;
}

struct Side {
  std::vector<Placed> branches;
  std::shared_ptr<torch::nn::Module> module;
  Workers workers;

  // What each task does, on its thread, in the state of this one.
  void run(const std::function<void(size_t)>& task) {
    const at::ThreadLocalState state;
    const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
    std::vector<Workers::Task> tasks;
    for (size_t i = 0; i < branches.size(); ++i)
      tasks.emplace_back([&, i] {
        const at::ThreadLocalStateGuard guard(state);
        const Autocast as_there(at::kCPU, autocast, dtype);
        task(i);
      });
    workers.run(std::move(tasks));
  }
};

// The branches' graphs, from forward to backward.
struct Graphs : torch::CustomClassHolder {
  explicit Graphs(std::shared_ptr<Side> side)
      : side(std::move(side)), inputs(this->side->branches.size()), outputs(inputs.size()) {}
  const std::shared_ptr<Side> side;
  std::vector<at::Tensor> inputs, outputs;
};

// `anchor` requires a gradient, so that backward comes even if the input requires none.
struct SideFunction : torch::autograd::Function<SideFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const at::Tensor& /*anchor*/,
                               const c10::intrusive_ptr<Graphs>& graphs, bool grad) {
    const bool wanted = grad && input.requires_grad();
    graphs->side->run([&](size_t i) {
      const auto& [layer, device] = graphs->side->branches[i];
      const at::AutoGradMode mode(grad);
      graphs->inputs[i] = input.detach().to(device);
      if (wanted) graphs->inputs[i].requires_grad_(true);
      graphs->outputs[i] = layer.forward(graphs->inputs[i]);
    });
    context->saved_data["graphs"] = c10::IValue::make_capsule(graphs);
    variable_list results;
    for (const auto& output : graphs->outputs)
      results.push_back(output.detach().to(graphs->side->branches[0].device));
    return results;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto graphs =
        c10::static_intrusive_pointer_cast<Graphs>(context->saved_data["graphs"].toCapsule());
    graphs->side->run([&](size_t i) {
      const at::Tensor& output = graphs->outputs[i];
      if (gradients[i].defined() && output.requires_grad())
        torch::autograd::backward({output}, {gradients[i].to(output.device())});
    });
    at::Tensor sum;
    for (const auto& input : graphs->inputs)
      if (input.grad().defined()) {
        const at::Tensor part = input.grad().to(graphs->inputs[0].device());
        sum = sum.defined() ? sum + part : part;
      }
    return {sum, {}, {}, {}};
  }
};

// A GPU computes beside the host, and its part of a backward has a thread of LibTorch's.
bool wants_threads(const Side& side) {
  return std::ranges::all_of(side.branches, [](const auto& b) { return b.device.is_cpu(); }) &&
         std::ranges::none_of(side.module->parameters(),
                              [](const auto& p) { return owner_of(p) != nullptr; });
}

}  // namespace

Layer in_series(const std::vector<Placed>& parts) {
  return {gather_modules(parts), [parts](at::Tensor x) {
            for (const auto& [layer, device] : parts) x = layer.forward(x.to(device));
            return x;
          }};
}

Layer side_by_side(const std::vector<Placed>& branches,
                   std::function<at::Tensor(const std::vector<at::Tensor>&)> join) {
  const auto module = gather_modules(branches);
  const int on_cpu =
      int(std::ranges::count_if(branches, [](const auto& b) { return b.device.is_cpu(); }));
  const int threads = std::max(1, at::get_num_threads() / std::max(1, on_cpu));
  const std::shared_ptr<Side> side(new Side{branches, module, {int(branches.size()), threads}});
  return {module, [side, join = std::move(join)](const at::Tensor& x) {
            if (!wants_threads(*side)) {
              std::vector<at::Tensor> results;
              for (const auto& [layer, device] : side->branches)
                results.push_back(layer.forward(x.to(device)).to(side->branches[0].device));
              return join(results);
            }
            const at::Tensor anchor = at::empty({0}).requires_grad_(true);
            return join(SideFunction::apply(x, anchor, c10::make_intrusive<Graphs>(side),
                                            at::GradMode::is_enabled()));
          }};
}

void run_pipeline(const std::vector<Placed>& parts, const std::string& schedule, int micro_batches,
                  const std::function<void(Pipeline&)>& train, const PipelineOptions& options) {
  const int stages = int(parts.size());
  if (options.data.zero == 3)
    fail(Kind::Usage, "parts that are sharded would be empty afterwards; take zero = 0, 1 or 2");
  for (const int chunks : {2, 1}) {  // stages of a rank, where the schedule allows two
    if (stages % chunks != 0) continue;
    const auto made = plan::make_schedule(
        schedule, {.ranks = stages / chunks, .micro_batches = micro_batches, .chunks = chunks});
    if (made.num_stages() != stages) continue;
    std::vector<LayerFactory> layers;
    comm::RunOptions run;
    for (const auto& [layer, device] : parts) {
      if (layer.module) layer.module->to(device);
      layers.push_back([layer = layer] { return layer; });
      if (int(run.devices.size()) < made.num_ranks())
        run.devices.push_back(device.is_cpu()
                                  ? topo::Device{}
                                  : topo::Device{topo::DeviceKind::Cuda, device.index()});
    }
    for (int stage = 0; stage < stages; ++stage)
      if (parts[size_t(stage)].device != parts[size_t(made.rank_of[size_t(stage)])].device)
        fail(Kind::Usage, "in ", schedule, " parts ", stage, " and ", made.rank_of[size_t(stage)],
             " are one rank's; put them on one device");
    PipelineOptions one_each = options;
    one_each.layers_per_stage.assign(size_t(stages), 1);
    return comm::run_ranks(
        made.num_ranks(),
        [&](comm::Communicator& world) {
          PipelineOptions mine = one_each;
          mine.data.device = parts[size_t(world.rank())].device;
          Pipeline pipeline(layers, made, MeshGroups(world, {.pp = made.num_ranks()}), mine);
          train(pipeline);
        },
        run);
  }
  fail(Kind::Usage, stages, " parts cannot be the stages of ", schedule,
       ", which has two for each rank; give an even number of parts");
}

}  // namespace yoke::parallel
