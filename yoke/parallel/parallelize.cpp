// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/parallelize.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/container/sequential.h>

#include <set>
#include <typeinfo>

#include "yoke/base/error.h"
#include "yoke/parallel/attention.h"

namespace yoke::parallel {
namespace {

using SplitKind = plan::SplitRule::Kind;

// Whether the rule is for such a layer; then it is cut.
bool apply(const plan::SplitRule& rule, torch::nn::Module& module, const TensorAxis& axis) {
  auto* linear = dynamic_cast<LinearImpl*>(&module);
  auto* embedding = dynamic_cast<EmbeddingImpl*>(&module);
  auto* attention = dynamic_cast<AttentionImpl*>(&module);
  if (rule.kind == SplitKind::Outputs && linear != nullptr)
    linear->split_outputs(axis, rule.parts);
  else if (rule.kind == SplitKind::Inputs && linear != nullptr)
    linear->split_inputs(axis);
  else if (rule.kind == SplitKind::Words && embedding != nullptr)
    embedding->split_words(axis);
  else if (rule.kind == SplitKind::Heads && attention != nullptr)
    attention->split_heads(axis);
  else
    return false;
  return true;
}

std::string plain_name(const torch::nn::Module& module) {
  return typeid(module) == typeid(torch::nn::LinearImpl)      ? "torch::nn::Linear"
         : typeid(module) == typeid(torch::nn::EmbeddingImpl) ? "torch::nn::Embedding"
                                                              : module.name();
}

// The layer with what the rules say of it cut. `used` gets the rules that were for a part of it.
Layer cut(Layer layer, int place, const plan::Plan& plan, const TensorAxis& axis,
          std::set<size_t>& used) {
  if (!layer.module) return layer;
  for (const auto& item : layer.module->named_modules()) {
    const std::string name = item.key().empty() ? cat(place) : cat(place, ".", item.key());
    const auto* whole = dynamic_cast<const Splittable*>(item.value().get());
    if (whole != nullptr && !whole->splits().empty())
      continue;  // with the layer that it is part of
    for (size_t i = 0; i < plan.splits.size(); ++i) {
      const auto& rule = plan.splits[i];
      if (!plan::matches(rule.pattern, name)) continue;
      if (apply(rule, *item.value(), axis)) {
        used.insert(i);
        break;
      }
      if (rule.pattern.find('*') == std::string::npos)
        fail(Kind::Config, "plan: split=", rule.pattern,
             " is for another layer of yoke::parallel than '", name, "', which is ",
             plain_name(*item.value()));
    }
  }
  return layer;
}

// One of ours with the same weights in place of torch's, where there is one.
Layer as_ours(const torch::nn::AnyModule& any) {
  const auto module = any.ptr();
  auto like = [](auto ours, const torch::nn::Module& theirs) {
    const at::NoGradGuard no_grad;
    for (auto& item : ours->named_parameters()) {
      item.value().set_data(theirs.named_parameters()[item.key()]);
      item.value().set_requires_grad(theirs.named_parameters()[item.key()].requires_grad());
    }
    return layer(ours);
  };
  const torch::nn::Module& given = *module;
  const auto& type = typeid(given);  // a class of the user's on top of it does more
  if (type == typeid(torch::nn::LinearImpl))
    return like(
        std::make_shared<LinearImpl>(dynamic_cast<const torch::nn::LinearImpl&>(given).options),
        given);
  if (type == typeid(torch::nn::EmbeddingImpl))
    return like(std::make_shared<EmbeddingImpl>(
                    dynamic_cast<const torch::nn::EmbeddingImpl&>(given).options),
                given);
  if (type == typeid(torch::nn::LayerNormImpl))
    return like(std::make_shared<LayerNormImpl>(
                    dynamic_cast<const torch::nn::LayerNormImpl&>(given).options),
                given);
  return {module, [any = any](const at::Tensor& x) mutable { return any.forward(x); }};
}

void want_splits(const plan::Plan& plan) {
  if (plan.tp > 1 && plan.splits.empty())
    fail(Kind::Config, "plan: tp = ", plan.tp,
         " wants to know which layers to cut: split=PATTERN:KIND");
}

// `scatters`: the model knows nothing of tokens that are elsewhere, so it is done around it.
std::unique_ptr<Pipeline> spread(const LayersOnAxis& layers_on, const plan::Plan& plan,
                                 const comm::Communicator& world, const DataParallelOptions& data,
                                 bool scatters) {
  plan.check(world.size(), int(layers_on({}).size()));
  const MeshGroups mesh(world, {.pp = plan.pp, .dp = plan.dp, .tp = plan.tp});
  const TensorAxis axis{mesh.tp, plan.sequence, mesh.dp};
  const auto layers = layers_on(axis);
  std::set<size_t> used;
  std::vector<LayerFactory> factories;
  for (size_t i = 0; i < layers.size(); ++i)
    factories.push_back([&, i] {
      Layer made = cut(layers[i](), int(i), plan, axis, used);
      if (!scatters || !axis.scatters()) return made;
      const auto* embedding = dynamic_cast<EmbeddingImpl*>(made.module.get());
      if (i == 0 && (embedding == nullptr || embedding->splits().empty()))
        made.forward = [axis, words = embedding != nullptr,
                        inner = made.forward](const at::Tensor& x) {
          if (!words && !at::isFloatingType(x.scalar_type()))
            fail(Kind::Config,
                 "plan: with sequence=yes a sequence that begins with words wants an "
                 "embedding as its first layer");
          return inner(words ? scatter_tokens(x.unsqueeze(-1), axis).squeeze(-1)
                             : scatter_tokens(x, axis));
        };
      if (i + 1 < layers.size()) return made;
      if (const auto* linear = dynamic_cast<LinearImpl*>(made.module.get());
          linear != nullptr && linear->how() == LinearImpl::Split::Outputs)
        fail(Kind::Config,
             "plan: with sequence=yes the last layer of a sequence cannot be cut by its "
             "outputs");
      made.forward = [axis, inner = made.forward](const at::Tensor& x) {
        return collect_tokens(inner(x), axis);
      };
      return made;
    });
  PipelineOptions options{.layers_per_stage = plan.layers_per_stage,
                          .ties = plan.ties,
                          .sequence = plan.sequence,
                          .partial = plan.partial,
                          .data = data};
  options.data.zero = plan.zero;
  auto pipeline = std::make_unique<Pipeline>(
      factories, plan::make_schedule(plan.schedule, plan.shape()), mesh, options);
  // A rule may be for another rank's layers.
  const at::Tensor seen = at::zeros({int64_t(plan.splits.size())}, at::kLong);
  for (const size_t i : used) seen[int64_t(i)] = 1;
  const at::Tensor all = seen.to(pipeline->device());
  if (all.numel() > 0) world.all_reduce(all).wait();
  for (size_t i = 0; i < plan.splits.size(); ++i)
    if (plan.tp > 1 && all[int64_t(i)].item<int64_t>() == 0)
      fail(
          Kind::Config, "plan: split=", plan.splits[i].pattern,
          " matches no layer that can be cut so; names are the place of the layer, and what it has "
          "in it after a dot");
  return pipeline;
}

}  // namespace

std::unique_ptr<Pipeline> parallelize(const LayersOnAxis& layers, const plan::Plan& plan,
                                      const comm::Communicator& world,
                                      const DataParallelOptions& data) {
  return spread(layers, plan, world, data, /*scatters=*/false);
}

std::unique_ptr<Pipeline> parallelize(const std::vector<LayerFactory>& layers,
                                      const plan::Plan& plan, const comm::Communicator& world,
                                      const DataParallelOptions& data) {
  want_splits(plan);
  return spread([&](const TensorAxis&) { return layers; }, plan, world, data, /*scatters=*/false);
}

std::unique_ptr<Pipeline> parallelize(torch::nn::SequentialImpl& model, const plan::Plan& plan,
                                      const comm::Communicator& world,
                                      const DataParallelOptions& data) {
  want_splits(plan);
  std::vector<LayerFactory> layers;
  for (const auto& any : model) layers.push_back([any = any] { return as_ours(any); });
  return spread([&](const TensorAxis&) { return layers; }, plan, world, data, /*scatters=*/true);
}

}  // namespace yoke::parallel
