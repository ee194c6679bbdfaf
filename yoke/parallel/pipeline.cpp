// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/pipeline.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "yoke/base/clock.h"
#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/parallel/kernels.h"
#include "yoke/parallel/layers.h"
#include "yoke/plan/balance.h"
#include "yoke/plan/check.h"
#include "yoke/plan/passes.h"
#include "yoke/plan/plan.h"

namespace yoke::parallel {
namespace {

using plan::Act;
using plan::Action;

bool has(const plan::Schedule& schedule, bool (*wanted)(const Action&)) {
  return std::ranges::any_of(schedule.rows,
                             [&](const auto& row) { return std::ranges::any_of(row, wanted); });
}

bool is_unshard(const Action& action) { return action.act == Act::Unshard; }

// What a rank runs: with messages, reductions and the optimizer's step.
plan::Schedule completed(plan::Schedule schedule, int zero) {
  // One rank has one stage, the whole model: its layers are gathered one by one as they are
  // touched.
  if (zero == 3 && schedule.num_ranks() > 1 && !has(schedule, is_unshard))
    schedule = plan::add_unshards(schedule);
  if (!has(schedule, [](const Action& action) { return action.is_message(); }))
    schedule = plan::add_messages(schedule);
  if (!has(schedule, [](const Action& action) { return action.act == Act::ReduceGrad; }))
    schedule = plan::add_reductions(schedule);
  plan::check(schedule);
  return schedule;
}

// The layers of a stage, under their place among all layers: names do not depend on the stages.
struct StageModule : torch::nn::Module {
  void add(int place, Layer layer) {
    if (layer.module) register_module(std::to_string(place), layer.module);
    layers.push_back(std::move(layer));
  }
  std::vector<Layer> layers;
};

struct Shape {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes = {};
  bool operator==(const Shape&) const = default;
};
std::string text_of(const Shape& shape) {
  return cat(c10::toString(shape.dtype), at::IntArrayRef(shape.sizes));
}
Shape shape_of(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.sizes().vec()}; }

constexpr int64_t kMaxDims = 14, kHeader = kMaxDims + 2;  // dtype, number of dims, sizes

// One micro-batch in one stage.
struct Cell {
  at::Tensor input = {};                         // of the stage, a leaf; until backward
  at::Tensor output = {};                        // until the next stage has it
  at::Tensor grad_output = {};                   // until backward
  at::Tensor grad_input = {};                    // until the stage before has it
  comm::Work arriving = {};                      // what is being received
  torch::autograd::Edge root = {};               // where backward begins
  std::shared_ptr<Deferral> deferral = nullptr;  // between I and W
};

}  // namespace

struct Pipeline::Impl {
  Impl(const std::vector<LayerFactory>& factories, const plan::Schedule& given,
       const MeshGroups& mesh, const PipelineOptions& options)
      : mesh(mesh), schedule(completed(given, options.data.zero)) {
    try {
      build(factories, options);
    } catch (const std::exception& error) {
      // The others may be in the middle of it.
      if (mesh.world.size() > 1) mesh.world.abort(comm::text_of(error));
      throw;
    }
  }

  void build(const std::vector<LayerFactory>& factories, const PipelineOptions& options) {
    if (schedule.num_ranks() != mesh.pp.size())
      fail(Kind::Usage, "the schedule ", schedule.name, " is for ", schedule.num_ranks(),
           " ranks, and the pipeline has ", mesh.pp.size());
    cut(int(factories.size()), options);
    const int num_stages = schedule.num_stages();
    stages.resize(size_t(num_stages));
    for (int stage = 0, layer = 0; stage < num_stages; ++stage) {
      if (mine(stage)) stages[size_t(stage)] = std::make_shared<StageModule>();
      for (int i = 0; i < per_stage[size_t(stage)]; ++i, ++layer)
        if (mine(stage)) stages[size_t(stage)]->add(layer, factories[size_t(layer)]());
    }
    // Parts in the order in which their gradients are complete.
    DataParallel::Parts parts;
    for (const auto& action : row()) {
      if (action.act == Act::W) split.insert({action.stage, action.micro});
      if (action.act == Act::Recompute) again.insert({action.stage, action.micro});
      if (action.act != Act::ReduceGrad) continue;
      part_of[action.stage] = parts.size();
      parts.push_back(stages[size_t(action.stage)]);
    }
    device = options.data.device.value_or(device);
    if (!device.is_cpu() && !device.has_index())
      device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    for (const auto& part : parts)
      for (const auto& parameter : part->parameters()) device = parameter.device();
    for (const auto& part : parts)
      for (const auto& module : part->modules())
        if (const auto* norm = module->as<LayerNormImpl>();
            norm != nullptr && norm->weight.defined())
          load_kernels(device, norm->weight.numel());
    agree();
    DataParallelOptions data_options = options.data;
    data_options.device = device;
    data_options.by_hand = has(schedule, is_unshard);
    data_options.across = mesh.across;
    for (const auto& names : options.ties) tie(names, data_options);
    share(options, data_options);
    data = std::make_unique<DataParallel>(std::move(parts), mesh.dp, data_options);
  }

  void cut(int layers, const PipelineOptions& options) {
    per_stage = options.layers_per_stage;
    if (per_stage.empty()) {
      if (!options.layer_cost.empty() && int(options.layer_cost.size()) != layers)
        fail(Kind::Usage, "layer_cost has ", options.layer_cost.size(), " numbers for ", layers,
             " layers");
      per_stage = plan::balance(options.layer_cost.empty()
                                    ? std::vector<double>(static_cast<size_t>(layers), 1.0)
                                    : options.layer_cost,
                                schedule.num_stages());
    }
    const bool whole = std::ranges::all_of(per_stage, [](int count) { return count >= 1; });
    if (int(per_stage.size()) != schedule.num_stages() || !whole ||
        std::accumulate(per_stage.begin(), per_stage.end(), 0) != layers)
      fail(Kind::Usage, "layers_per_stage wants ", schedule.num_stages(),
           " numbers from 1 on that add up to ", layers, " layers, got ", per_stage.size(),
           " that add up to ", std::accumulate(per_stage.begin(), per_stage.end(), 0));
  }

  // Ranks that cut the layers in other places would still exchange tensors that fit.
  void agree() const {
    std::vector<int64_t> mine(per_stage.begin(), per_stage.end());
    for (const int rank : schedule.rank_of) mine.push_back(rank);
    const at::Tensor least = at::tensor(mine, at::kLong).to(device), most = least.clone();
    mesh.world.all_reduce(least, comm::ReduceOp::Min).wait();
    mesh.world.all_reduce(most, comm::ReduceOp::Max).wait();
    if (!at::equal(least, most))
      fail(Kind::Usage,
           "the ranks do not agree on the stages of the layers; give all of them the "
           "same schedule, layers_per_stage and layer_cost");
  }

  void tie(const std::vector<std::string>& names, DataParallelOptions& data_options) {
    std::vector<at::Tensor> here;
    for (const auto& stage : stages)
      for (const auto& item :
           stage ? stage->named_parameters() : torch::OrderedDict<std::string, at::Tensor>())
        if (std::ranges::find(names, item.key()) != names.end()) here.push_back(item.value());
    const at::Tensor found =
        at::full({1}, int64_t(here.size()), at::device(device).dtype(at::kLong));
    mesh.pp.all_reduce(found).wait();
    if (found.item<int64_t>() != int64_t(names.size()))
      fail(Kind::Usage, "of the ", names.size(), " parameters '", join(names, "', '"),
           "' that are to be tied there are ", found.item<int64_t>(),
           "; a name is the place of the layer, a dot, and its name there");
    const at::NoGradGuard no_grad;
    for (auto& other : here) {
      if (other.sizes() != here[0].sizes())
        fail(Kind::Usage, "'", join(names, "', '"), "' cannot be tied: their shapes are ",
             here[0].sizes(), " and ", other.sizes());
      if (!other.is_same(here[0])) other.set_data(here[0]);
    }
    const auto group = mesh.pp.split(here.empty() ? -1 : 0, mesh.pp.rank());
    if (group) data_options.shared.push_back({.names = names, .group = group, .tied = true});
  }

  // What the ranks of a layer all have. Each with its own tokens has a part of the gradient.
  void share(const PipelineOptions& options, DataParallelOptions& data_options) const {
    if (mesh.tp.size() == 1) return;
    const at::NoGradGuard no_grad;
    std::vector<std::string> names, parts;
    const auto is_partial = [&](const std::string& name) {
      return options.sequence || std::ranges::any_of(options.partial, [&](const auto& pattern) {
               return plan::matches(pattern, name);
             });
    };
    for (const auto& stage : stages) {
      if (!stage) continue;
      for (const auto& name : whole_parameters(*stage)) {
        const at::Tensor parameter = stage->named_parameters()[name];
        if (parameter.requires_grad())
          (is_partial(name) ? parts : names).push_back(name);
        else
          mesh.tp.broadcast(parameter, 0).wait();
      }
      for (const auto& buffer : stage->buffers()) mesh.tp.broadcast(buffer, 0).wait();
    }
    for (const auto& tied : data_options.shared)
      for (const auto& name : tied.names)
        if (std::ranges::count(names, name) + std::ranges::count(parts, name) > 0)
          fail(Kind::Usage, "'", name, "' is tied, and not split over the ", mesh.tp.size(),
               " ranks of a layer; split the embedding by words and the head by outputs");
    if (!names.empty())
      data_options.shared.push_back({.names = names, .group = mesh.tp, .sum = false});
    if (!parts.empty()) data_options.shared.push_back({.names = parts, .group = mesh.tp});
  }

  const std::vector<Action>& row() const { return schedule.rows[size_t(mesh.pp.rank())]; }
  int rank_of(int stage) const { return schedule.rank_of[size_t(stage)]; }
  bool mine(int stage) const { return rank_of(stage) == mesh.pp.rank(); }
  bool last(int stage) const { return stage + 1 == schedule.num_stages(); }
  Cell& cell(int stage, int micro) { return cells[{stage, micro}]; }

  Loss run(const Batch& given, bool train) {
    if (train && data->awaits_step())
      fail(Kind::Usage,
           "run() again before the optimizer's step; one run has all micro-batches "
           "of a step");
    batch = &given;
    training = train;
    for (const auto& stage : stages)
      if (stage && stage->is_training() != train) stage->train(train);
    total = {};
    times.clear();
    start = SteadyClock().now();
    const auto& actions = row();
    for (size_t i = 0; i < actions.size(); ++i) {
      const Action action = actions[i];
      const bool ahead = action.act == Act::F || action.act == Act::SendF ||
                         action.act == Act::RecvF || action.act == Act::Unshard ||
                         action.act == Act::Reshard;
      if (!train && !ahead) continue;
      begin = SteadyClock().now();
      try {
        perform(action, i);
      } catch (const std::exception& error) {
        const auto* own = dynamic_cast<const Error*>(&error);
        const std::string text = action.stage < 0
                                     ? comm::text_of(error)
                                     : cat("stage ", action.stage, ", ", plan::to_text(action),
                                           ": ", comm::text_of(error));
        reset();
        data->abandon_passes();
        if (mesh.world.size() > 1) mesh.world.abort(text);
        throw Error(own ? own->kind() : Kind::Internal, text);
      }
      times.push_back({action, seconds(begin), seconds(SteadyClock().now())});
    }
    for (const auto& work : sent) work.wait();
    reset();
    first_run = false;
    if (!train) return total;
    data->end_passes(mesh.tp.rank() == 0 ? total.count : 0);  // the others have the same samples
    return total;
  }

  void reset() {
    cells.clear();
    sent.clear();
    batch = nullptr;
  }

  double seconds(Time time) const { return std::chrono::duration<double>(time - start).count(); }

  void perform(const Action& action, size_t index) {
    const auto [stage, act, micro] = action;
    switch (act) {
      case Act::F:
        return forward(stage, micro);
      case Act::Recompute: {
        Cell& c = cell(stage, micro);
        c.root = torch::autograd::impl::gradient_edge(compute(stage, micro, /*count=*/false));
        return;
      }
      case Act::I:
      case Act::B:
        return backward(stage, micro, act == Act::B && completes(index));
      case Act::W: {
        const auto deferral = std::move(cell(stage, micro).deferral);
        return data->pass(part_of.at(stage), completes(index),
                          [&](const Deliver& deliver) { deferral->run(deliver); });
      }
      case Act::SendF:
        return send_output(stage, micro);
      case Act::RecvF:
        return receive_input(stage, micro);
      case Act::SendB:
        return send(std::move(cell(stage, micro).grad_input), stage - 1);
      case Act::RecvB: {
        const Shape& shape = shapes.at({stage, micro});
        Cell& c = cell(stage, micro);
        c.grad_output = at::empty(shape.sizes, at::device(device).dtype(shape.dtype));
        c.arriving = mesh.pp.recv(c.grad_output, rank_of(stage + 1));
        return;
      }
      case Act::ReduceGrad:
        if (!reduced_early(index)) data->pass(part_of.at(stage), true, [](const Deliver&) {});
        return;
      case Act::Unshard:
        return data->unshard(part_of.at(stage));
      case Act::Reshard:
        return data->reshard(part_of.at(stage));
      case Act::OptStep:
        return;
    }
  }

  // Whether gradients of this pass are to be reduced while it runs.
  bool completes(size_t index) const {
    if (data->options().zero >= 2) return true;
    const auto& actions = row();
    size_t next = index + 1;
    while (next < actions.size() && actions[next].is_message()) ++next;
    return next < actions.size() &&
           actions[next] == Action{actions[index].stage, Act::ReduceGrad, -1};
  }
  bool reduced_early(size_t index) const {
    while (index > 0 && row()[index - 1].is_message()) --index;
    return index > 0 && row()[index - 1].stage == row()[index].stage &&
           (row()[index - 1].act == Act::W || row()[index - 1].act == Act::B);
  }

  void wait(comm::Work& work) {
    std::exchange(work, {}).wait();
    begin = SteadyClock().now();
  }

  at::Tensor compute(int stage, int micro, bool count) {
    Cell& c = cell(stage, micro);
    if (training && split.contains({stage, micro})) c.deferral = std::make_shared<Deferral>();
    const Deferral::Scope scope(c.deferral);
    const Passing::Scope known(batch->passing ? batch->passing(micro) : Passing());
    at::Tensor x = c.input;
    for (const auto& layer : stages[size_t(stage)]->layers) x = layer.forward(x);
    if (!last(stage)) return x;
    const Loss loss = batch->loss(x, micro);
    if (!loss.sum.defined() || loss.sum.numel() != 1 || !(loss.count >= 0))
      fail(Kind::Usage, "the loss wants a sum of one element and a count from 0 on, got ",
           loss.sum.defined() ? loss.sum.numel() : 0, " elements and ", loss.count);
    if (!count) return loss.sum;
    const at::Tensor sum = loss.sum.detach();
    total.sum = total.sum.defined() ? total.sum + sum : sum;
    total.count += loss.count;
    return loss.sum;
  }

  void forward(int stage, int micro) {
    Cell& c = cell(stage, micro);
    if (stage == 0) {
      c.input = batch->input(micro);
      if (!c.input.defined()) fail(Kind::Usage, "input() gave no tensor");
    } else {
      if (mine(stage - 1)) c.input = std::move(cell(stage - 1, micro).output);
      wait(c.arriving);
      c.input = c.input.detach().requires_grad_(true);
    }
    const bool keep = training && !again.contains({stage, micro});
    const at::AutoGradMode grad(keep);
    const at::Tensor output = compute(stage, micro, /*count=*/true);
    if (keep) c.root = torch::autograd::impl::gradient_edge(output);
    if (keep && last(stage) && c.input.requires_grad() && !output.requires_grad())
      fail(Kind::Usage, "the loss has no gradient: it was detached, or made under no_grad");
    if (!training) c.input.reset();
    if (last(stage)) return;
    if (!at::isFloatingType(output.scalar_type()))
      fail(Kind::Usage, "it gives ", c10::toString(output.scalar_type()),
           ", and what goes to another stage wants a gradient; give a floating type");
    const Shape now = shape_of(output);
    const Shape& known = shapes.try_emplace({stage, micro}, now).first->second;
    if (known != now)
      fail(Kind::Usage, "it gives ", text_of(now), ", and gave ", text_of(known),
           " in the first run; every run wants the same shapes");
    c.output = output.detach();
  }

  // Backward needs no output, only where it comes from: so the tensor goes as soon as it is sent.
  void backward(int stage, int micro, bool reduce) {
    Cell& c = cell(stage, micro);
    at::Tensor gradient;
    if (!last(stage)) {
      gradient =
          mine(stage + 1) ? std::move(cell(stage + 1, micro).grad_input) : std::move(c.grad_output);
      wait(c.arriving);
    }
    data->pass(part_of.at(stage), reduce, [&](const Deliver&) {
      if (!c.root.is_valid()) return;  // nothing in it can be trained
      const auto& metadata = c.root.function->input_metadata(c.root.input_nr);
      if (last(stage))
        gradient = at::full_symint(metadata.shape_as_dim_vector(), data->loss_scale().value,
                                   at::device(metadata.device()).dtype(metadata.dtype()));
      torch::autograd::Engine::get_default_engine().execute(
          {c.root}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
          /*accumulate_grad=*/true);
    });
    c.root = {};
    if (stage > 0) {
      c.grad_input = c.input.grad();
      if (!c.grad_input.defined()) c.grad_input = at::zeros_like(c.input);
    }
    c.input.reset();
  }

  void send(at::Tensor tensor, int to_stage) {
    std::erase_if(sent, [](const auto& work) { return work.done(); });
    sent.push_back(mesh.pp.send(tensor.contiguous(), rank_of(to_stage)));
  }

  void send_output(int stage, int micro) {
    const at::Tensor output = std::move(cell(stage, micro).output);
    if (first_run) {
      const at::Tensor header = at::zeros({kHeader}, at::kLong);
      auto* words = header.mutable_data_ptr<int64_t>();
      if (output.dim() > kMaxDims)
        fail(Kind::Usage, "it gives ", output.dim(), " dims, at most ", kMaxDims, " can be sent");
      words[0] = int64_t(output.scalar_type());
      words[1] = output.dim();
      std::ranges::copy(output.sizes(), words + 2);
      send(header.to(device), stage + 1);
    }
    send(output, stage + 1);
  }

  void receive_input(int stage, int micro) {
    if (first_run) {
      const at::Tensor header = at::empty({kHeader}, at::device(device).dtype(at::kLong));
      mesh.pp.recv(header, rank_of(stage - 1)).wait();
      const at::Tensor here = header.cpu();
      const auto* words = here.const_data_ptr<int64_t>();
      shapes[{stage - 1, micro}] = {at::ScalarType(words[0]), {words + 2, words + 2 + words[1]}};
    }
    const Shape& shape = shapes.at({stage - 1, micro});
    Cell& c = cell(stage, micro);
    c.input = at::empty(shape.sizes, at::device(device).dtype(shape.dtype));
    c.arriving = mesh.pp.recv(c.input, rank_of(stage - 1));
  }

  using Key = std::pair<int, int>;  // stage, micro-batch
  const MeshGroups mesh;
  const plan::Schedule schedule;
  std::vector<int> per_stage;
  std::vector<std::shared_ptr<StageModule>> stages;  // null: another rank's
  std::map<int, size_t> part_of;                     // by stage
  std::set<Key> split, again;                        // with I and W; with Recompute
  at::Device device = at::kCPU;
  std::unique_ptr<DataParallel> data;
  std::map<Key, Shape> shapes;  // of what a stage gives
  bool first_run = true;
  bool training = true;

  // Of the run:
  const Batch* batch = nullptr;
  std::map<Key, Cell> cells;
  std::vector<comm::Work> sent;
  Loss total;
  std::vector<plan::Timed> times;
  Time start, begin;
};

Pipeline::Pipeline(const std::vector<LayerFactory>& layers, const plan::Schedule& schedule,
                   const MeshGroups& mesh, const PipelineOptions& options)
    : impl_(std::make_unique<Impl>(layers, schedule, mesh, options)) {}
Pipeline::~Pipeline() = default;

Pipeline::Loss Pipeline::run(const Batch& batch) { return impl_->run(batch, /*train=*/true); }
Pipeline::Loss Pipeline::evaluate(const Batch& batch) { return impl_->run(batch, /*train=*/false); }
DataParallel& Pipeline::data() { return *impl_->data; }
at::Device Pipeline::device() const { return impl_->device; }
const MeshGroups& Pipeline::mesh() const { return impl_->mesh; }
const plan::Schedule& Pipeline::schedule() const { return impl_->schedule; }
const std::vector<int>& Pipeline::layers_per_stage() const { return impl_->per_stage; }
const std::vector<plan::Timed>& Pipeline::times() const { return impl_->times; }

}  // namespace yoke::parallel
