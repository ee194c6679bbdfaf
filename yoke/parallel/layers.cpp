// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/layers.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "yoke/base/error.h"
#include "yoke/parallel/autocast.h"
#include "yoke/parallel/deferral.h"
#include "yoke/parallel/kernels.h"
#include "yoke/parallel/matvec.h"
#include "yoke/parallel/touch.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Split = LinearImpl::Split;

// What a layer's backward needs to know.
struct Way : torch::CustomClassHolder {
  std::shared_ptr<Deferral> deferral = nullptr;
  TensorAxis axis = {};
  Split split = Split::None;
};
using Held = c10::intrusive_ptr<Way>;

void keep(AutogradContext* context, const Held& way) {
  context->saved_data["way"] = c10::IValue::make_capsule(way);
}
Held kept(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Way>(context->saved_data["way"].toCapsule());
}

// Null: the torch counterpart does all that is wanted.
Held way_of(const TensorAxis& axis, Split split, std::initializer_list<at::Tensor> parameters) {
  auto way = c10::make_intrusive<Way>();
  way->axis = axis;
  way->split = split;
  way->deferral = at::GradMode::is_enabled() ? Deferral::current() : nullptr;
  for (const auto& parameter : parameters)
    if (parameter.defined() && !(parameter.is_leaf() && parameter.requires_grad()))
      way->deferral = nullptr;
  return way->deferral || split != Split::None ? way : nullptr;
}

// Puts off a weight gradient, or makes it.
at::Tensor settle(const Held& way, const at::Tensor& leaf,
                  const std::function<at::Tensor()>& gradient) {
  if (!leaf.defined() || !leaf.requires_grad()) return {};
  if (!way->deferral) return gradient();
  way->deferral->add(leaf, gradient);
  return {};
}

// Autograd wants to be told of what is not there.
std::optional<at::Tensor> maybe(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

at::Tensor rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// cuBLAS adds the bias to a matrix of two dims while it writes it; to one of three LibTorch adds it
// afterwards, in another pass over memory.
at::Tensor apply_linear(const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  if (is_matvec(input, weight)) return matvec(input, weight, bias);
  if (!input.is_cuda() || input.dim() < 3 || !bias) return at::linear(input, weight, bias);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return at::linear(rows(input), weight, bias).view(sizes);
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Held& way) {
    const at::Tensor none;
    context->save_for_backward({input, weight, bias.value_or(none)});
    keep(context, way);
    const bool gathers = way->split == Split::Outputs && way->axis.scatters();
    const at::Tensor all = gathers ? gather_tokens(input, way->axis).wait() : input;
    if (way->split != Split::Inputs) return apply_linear(all, weight, bias);
    at::Tensor output = reduce_partial(at::linear(all, weight), way->axis).wait();
    return bias ? output.add_(*bias) : output;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto way = kept(context);
    const at::Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
    const bool by_outputs = way->split == Split::Outputs, scatters = way->axis.scatters();
    Gathering inputs;
    if (by_outputs && scatters) inputs = gather_tokens(input, way->axis);
    const at::Tensor dy = way->split == Split::Inputs && scatters
                              ? gather_tokens(gradients[0], way->axis).wait()
                              : gradients[0];
    // The other ranks' part of the input's gradient travels while the weights' is computed.
    Reduction dx;
    if (input.requires_grad()) {
      dx.result = dy.matmul(weight.to(dy.scalar_type()));
      if (by_outputs) dx = reduce_partial(dx.result, way->axis);
    }
    const at::Tensor x = inputs.all.defined() ? inputs.wait() : input;
    const at::Tensor dw =
        settle(way, weight, [=] { return rows(dy).t().mm(rows(x.to(dy.scalar_type()))); });
    const at::Tensor db = settle(way, bias, [own = gradients[0]] { return rows(own).sum(0); });
    return {dx.wait(), dw, db, {}};
  }
};

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& given, int64_t padding, bool by_frequency,
                            const Held& way) {
    at::Tensor indices = given, elsewhere;
    if (way->split != Split::None) {
      const int64_t words = weight.size(0), first = way->axis.rank() * words;
      check_words(given, words * way->axis.size(), std::nullopt);
      indices = given - first;
      elsewhere = (indices < 0).logical_or(indices >= words);
      indices.masked_fill_(elsewhere, 0);
      padding = padding >= first && padding < first + words ? padding - first : -1;
    }
    context->save_for_backward({weight, indices, elsewhere});
    context->saved_data["padding"] = padding;
    context->saved_data["by_frequency"] = by_frequency;
    keep(context, way);
    at::Tensor output = at::embedding(weight, indices, padding, by_frequency);
    if (way->split == Split::None) return output;
    return reduce_partial(output.masked_fill_(elsewhere.unsqueeze(-1), 0), way->axis).wait();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto way = kept(context);
    const int64_t padding = context->saved_data["padding"].toInt();
    const bool by_frequency = context->saved_data["by_frequency"].toBool();
    at::Tensor dy = way->axis.scatters() && way->split != Split::None
                        ? gather_tokens(gradients[0], way->axis).wait()
                        : gradients[0];
    if (saved[2].defined()) dy = dy.masked_fill(saved[2].unsqueeze(-1), 0);
    return {settle(way, saved[0],
                   [indices = saved[1], words = saved[0].size(0), dy, padding, by_frequency] {
                     return at::embedding_dense_backward(dy, indices, words, padding, by_frequency);
                   }),
            {},
            {},
            {},
            {}};
  }
};

struct LayerNormFunction : torch::autograd::Function<LayerNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            at::IntArrayRef shape, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, double eps, const Held& way) {
    auto [output, mean, rstd] = at::native_layer_norm(input, shape, weight, bias, eps);
    // Autocast may have computed it in another type, which backward wants throughout.
    context->save_for_backward(
        {input.to(output.scalar_type()), weight, bias.value_or(at::Tensor()), mean, rstd});
    context->saved_data["shape"] = shape;
    keep(context, way);
    return output;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto way = kept(context);
    const at::Tensor &input = saved[0], &weight = saved[1], &bias = saved[2], dy = gradients[0];
    const auto half = [input, weight, bias, mean = saved[3], rstd = saved[4], dy,
                       shape = context->saved_data["shape"].toIntVector()](
                          bool of_input, bool of_weight, bool of_bias) {
      const auto as_input = [&](const at::Tensor& t) {
        return t.defined() ? t.to(input.scalar_type()) : t;
      };
      return at::native_layer_norm_backward(as_input(dy), input, shape, mean, rstd,
                                            as_input(weight), as_input(bias),
                                            {of_input, of_weight, of_bias});
    };
    // Both in one go, when the first is asked for.
    const auto both = std::make_shared<std::pair<at::Tensor, at::Tensor>>();
    way->deferral->add(weight, [=] {
      std::tie(std::ignore, both->first, both->second) = half(false, true, bias.defined());
      return both->first.to(weight.scalar_type());
    });
    if (bias.defined())
      way->deferral->add(bias, [=] { return both->second.to(bias.scalar_type()); });
    at::Tensor dx;
    if (context->needs_input_grad(0)) dx = std::get<0>(half(true, false, false));
    return {dx, {}, {}, {}, {}, {}};
  }
};

// With kernels of our own. Gives the sum and its norm.
struct FusedNormFunction : torch::autograd::Function<FusedNormFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const std::optional<at::Tensor>& branch, const at::Tensor& weight,
                               const at::Tensor& bias, double eps, const Held& way) {
    YOKE_TOUCH("yoke::fused_norm", weight, bias);
    const Normed normed = fused_norm(x, branch.value_or(at::Tensor()), weight, bias, eps);
    context->save_for_backward({normed.sum, weight, bias, normed.mean, normed.rstd});
    context->saved_data["adds"] = branch.has_value();
    context->set_materialize_grads(false);
    keep(context, way);
    return {normed.sum, normed.result};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto way = kept(context);
    const bool adds = context->saved_data["adds"].toBool();
    if (at::GradMode::is_enabled())
      fail(Kind::Usage,
           "on a GPU the gradient of a LayerNorm of yoke has no gradient; take torch's");
    if (!gradients[1].defined())
      return {gradients[0], adds ? gradients[0] : at::Tensor(), {}, {}, {}, {}};
    const auto& [dx, dw, db] =
        fused_norm_backward(gradients[1].contiguous(),
                            gradients[0].defined() ? gradients[0].contiguous() : at::Tensor(),
                            saved[0], saved[1], saved[3], saved[4]);
    return {dx,
            adds ? dx : at::Tensor(),
            settle(way, saved[1], [dw = dw] { return dw; }),
            settle(way, saved[2], [db = db] { return db; }),
            {},
            {}};
  }
};

// This rank's part of each part of a dim, with the values of the first rank.
void keep_part(at::Tensor& parameter, int64_t dim, const std::vector<int64_t>& parts,
               const TensorAxis& axis) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = parameter.detach().contiguous();
  axis.group.broadcast(all, 0).wait();
  std::vector<at::Tensor> mine;
  for (int64_t begin = 0; const int64_t part : parts) {
    const int64_t count = part / axis.size();
    mine.push_back(all.narrow(dim, begin + axis.rank() * count, count));
    begin += part;
  }
  parameter.set_data(at::cat(mine, dim));
}

}  // namespace

void LinearImpl::keep(int64_t dim, std::vector<int64_t> parts) {
  parts_ = std::move(parts);
  keep_part(weight, dim, parts_, axis_);
  if (!bias.defined()) return;
  if (dim == 0)
    keep_part(bias, 0, parts_, axis_);
  else
    axis_.group.broadcast(bias.detach(), 0).wait();
}

void LinearImpl::split_outputs(const TensorAxis& axis, std::vector<int64_t> parts) {
  if (split_ != Split::None) fail(Kind::Usage, "a linear layer can be cut only once");
  if (parts.empty()) parts = {options.out_features()};
  for (const int64_t part : parts) axis.part_of(part, "outputs of a linear layer");
  if (std::accumulate(parts.begin(), parts.end(), int64_t{0}) != options.out_features())
    fail(Kind::Usage, "the parts of a linear layer's outputs add up to ",
         std::accumulate(parts.begin(), parts.end(), int64_t{0}), ", it has ",
         options.out_features());
  if (axis.size() == 1) return;
  axis_ = axis;
  split_ = Split::Outputs;
  keep(0, std::move(parts));
}

void LinearImpl::split_inputs(const TensorAxis& axis) {
  if (split_ != Split::None) fail(Kind::Usage, "a linear layer can be cut only once");
  axis.part_of(options.in_features(), "inputs of a linear layer");
  if (axis.size() == 1) return;
  axis_ = axis;
  split_ = Split::Inputs;
  keep(1, {options.in_features()});
}

std::vector<ParameterSplit> LinearImpl::splits() const {
  if (split_ == Split::None) return {};
  if (split_ == Split::Inputs) return {{"weight", 1, parts_}};
  if (!bias.defined()) return {{"weight", 0, parts_}};
  return {{"weight", 0, parts_}, {"bias", 0, parts_}};
}

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  if (const Held way = way_of(axis_, split_, {weight, bias}))
    return LinearFunction::apply(input, weight, maybe(bias), way);
  return apply_linear(input, weight, maybe(bias));
}

void EmbeddingImpl::split_words(const TensorAxis& axis) {
  if (axis_.size() > 1) fail(Kind::Usage, "an embedding can be cut only once");
  axis.part_of(options.num_embeddings(), "words of an embedding");
  if (options.max_norm() || options.sparse() || options.scale_grad_by_freq())
    fail(Kind::Usage,
         "an embedding with max_norm, sparse gradients or scale_grad_by_freq cannot be split");
  if (axis.size() == 1) return;
  axis_ = axis;
  keep_part(weight, 0, {options.num_embeddings()}, axis);
}

std::vector<ParameterSplit> EmbeddingImpl::splits() const {
  if (axis_.size() == 1) return {};
  return {{"weight", 0, {options.num_embeddings()}}};
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  const bool special = options.max_norm() || options.sparse();
  const Held way =
      special ? nullptr : way_of(axis_, axis_.size() > 1 ? Split::Outputs : Split::None, {weight});
  if (!way) return torch::nn::EmbeddingImpl::forward(indices);
  int64_t padding = options.padding_idx().value_or(-1);
  if (options.padding_idx() && padding < 0) padding += options.num_embeddings();
  return EmbeddingFunction::apply(weight, indices, padding, options.scale_grad_by_freq(), way);
}

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  if (has_norm_kernels(input, weight, bias)) return fused(input, {})[1];
  // On a GPU statistics and sums are float32 in any case; autocast would make that of the results
  // as well.
  std::optional<Autocast> off;
  const auto type = input.scalar_type();
  if (input.is_cuda() && weight.defined() && bias.defined() && type == weight.scalar_type())
    off.emplace(input.device().type(), false, type);
  const Held way = weight.defined() ? way_of({}, Split::None, {weight, bias}) : nullptr;
  if (!way) return torch::nn::LayerNormImpl::forward(input);
  return LayerNormFunction::apply(input, at::IntArrayRef(options.normalized_shape()), weight,
                                  maybe(bias), options.eps(), way);
}

std::vector<at::Tensor> LayerNormImpl::fused(const at::Tensor& input, const at::Tensor& branch) {
  Held way = way_of({}, Split::None, {weight, bias});
  if (!way) way = c10::make_intrusive<Way>();
  return FusedNormFunction::apply(input, maybe(branch), weight, bias, options.eps(), way);
}

LayerNormImpl::Sum LayerNormImpl::sum(const at::Tensor& input, const at::Tensor& branch) {
  const bool alike = !branch.defined() || (branch.sizes() == input.sizes() &&
                                           branch.scalar_type() == input.scalar_type() &&
                                           branch.device() == input.device() && is_aligned(branch));
  if (alike && has_norm_kernels(input, weight, bias)) {
    const auto both = fused(input, branch);
    return {both[0], both[1]};
  }
  const at::Tensor sum = branch.defined() ? input + branch : input;
  return {sum, forward(sum)};
}

RmsNormImpl::RmsNormImpl(int64_t dim, double eps)
    : weight(register_parameter("weight", at::ones({dim}))), eps_(eps) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, {weight.numel()}, weight, eps_);
}

std::vector<ParameterSplit> splits_of(const torch::nn::Module& module) {
  std::vector<ParameterSplit> result;
  for (const auto& item : module.named_modules())
    if (const auto* layer = dynamic_cast<const Splittable*>(item.value().get()))
      for (auto split : layer->splits()) {
        if (!item.key().empty()) split.name = item.key() + "." + split.name;
        result.push_back(std::move(split));
      }
  return result;
}

std::vector<std::string> whole_parameters(const torch::nn::Module& module) {
  std::set<std::string> split;
  for (const auto& parameter : splits_of(module)) split.insert(parameter.name);
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters())
    if (!split.contains(item.key())) names.push_back(item.key());
  return names;
}

at::Tensor join_parts(const at::Tensor& mine, const ParameterSplit& split, const TensorAxis& axis) {
  const at::NoGradGuard no_grad;
  if (axis.size() == 1) return mine;
  auto sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), axis.size());
  const at::Tensor all = at::empty(sizes, mine.options());
  axis.group.all_gather(all, mine.contiguous()).wait();
  std::vector<at::Tensor> pieces;
  for (int64_t begin = 0; const int64_t part : split.parts) {
    const int64_t count = part / axis.size();
    for (int64_t rank = 0; rank < axis.size(); ++rank)
      pieces.push_back(all[rank].narrow(split.dim, begin, count));
    begin += count;
  }
  return at::cat(pieces, split.dim);
}

}  // namespace yoke::parallel
