// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/layers.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "yoke/parallel/deferral.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(std::shared_ptr<Deferral> deferral) : deferral(std::move(deferral)) {}
  const std::shared_ptr<Deferral> deferral;
};
using Held = c10::intrusive_ptr<Holder>;

void keep(AutogradContext* context, const Held& held) {
  context->saved_data["deferral"] = c10::IValue::make_capsule(held);
}
Deferral& kept(AutogradContext* context) {
  return *c10::static_intrusive_pointer_cast<Holder>(context->saved_data["deferral"].toCapsule())
              ->deferral;
}

// Where the weight gradients of a layer with these parameters are to go; null: to autograd.
Held place_for(std::initializer_list<at::Tensor> parameters) {
  auto deferral = Deferral::current();
  if (!deferral || !at::GradMode::is_enabled()) return {};
  for (const auto& parameter : parameters)
    if (parameter.defined() && !(parameter.is_leaf() && parameter.requires_grad())) return {};
  return c10::make_intrusive<Holder>(std::move(deferral));
}

// Autograd wants to be told of what is not there.
std::optional<at::Tensor> maybe(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Held& held) {
    context->save_for_backward({input, weight, bias.value_or(at::Tensor())});
    keep(context, held);
    return at::linear(input, weight, bias);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &bias = saved[2], dy = gradients[0];
    kept(context).add(weight, [=] {
      const at::Tensor rows = dy.reshape({-1, dy.size(-1)});
      return rows.t().mm(input.to(dy.scalar_type()).reshape({-1, input.size(-1)}));
    });
    if (bias.defined())
      kept(context).add(bias, [=] { return dy.reshape({-1, dy.size(-1)}).sum(0); });
    at::Tensor dx;
    if (input.requires_grad()) dx = dy.matmul(weight.to(dy.scalar_type()));
    return {dx, {}, {}, {}};
  }
};

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& indices, int64_t padding, bool by_frequency,
                            const Held& held) {
    context->save_for_backward({weight, indices});
    context->saved_data["padding"] = padding;
    context->saved_data["by_frequency"] = by_frequency;
    keep(context, held);
    return at::embedding(weight, indices, padding, by_frequency);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const int64_t padding = context->saved_data["padding"].toInt();
    const bool by_frequency = context->saved_data["by_frequency"].toBool();
    kept(context).add(saved[0], [indices = saved[1], rows = saved[0].size(0), dy = gradients[0],
                                 padding, by_frequency] {
      return at::embedding_dense_backward(dy, indices, rows, padding, by_frequency);
    });
    return {{}, {}, {}, {}, {}};
  }
};

struct LayerNormFunction : torch::autograd::Function<LayerNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            at::IntArrayRef shape, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, double eps, const Held& held) {
    auto [output, mean, rstd] = at::native_layer_norm(input, shape, weight, bias, eps);
    context->save_for_backward({input, weight, bias.value_or(at::Tensor()), mean, rstd});
    context->saved_data["shape"] = shape;
    keep(context, held);
    return output;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &bias = saved[2], dy = gradients[0];
    const auto half = [input, weight, bias, mean = saved[3], rstd = saved[4], dy,
                       shape = context->saved_data["shape"].toIntVector()](
                          bool of_input, bool of_weight, bool of_bias) {
      return at::native_layer_norm_backward(dy, input, shape, mean, rstd, weight, bias,
                                            {of_input, of_weight, of_bias});
    };
    // Both in one go, when the first is asked for.
    const auto both = std::make_shared<std::pair<at::Tensor, at::Tensor>>();
    kept(context).add(weight, [=] {
      std::tie(std::ignore, both->first, both->second) = half(false, true, bias.defined());
      return both->first;
    });
    if (bias.defined()) kept(context).add(bias, [=] { return both->second; });
    at::Tensor dx;
    if (input.requires_grad()) dx = std::get<0>(half(true, false, false));
    return {dx, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  if (const Held held = place_for({weight, bias}))
    return LinearFunction::apply(input, weight, maybe(bias), held);
  return torch::nn::LinearImpl::forward(input);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  const Held held = options.max_norm() || options.sparse() ? Held() : place_for({weight});
  if (!held) return torch::nn::EmbeddingImpl::forward(indices);
  int64_t padding = options.padding_idx().value_or(-1);
  if (options.padding_idx() && padding < 0) padding += weight.size(0);
  return EmbeddingFunction::apply(weight, indices, padding, options.scale_grad_by_freq(), held);
}

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  const Held held = weight.defined() ? place_for({weight, bias}) : Held();
  if (!held) return torch::nn::LayerNormImpl::forward(input);
  return LayerNormFunction::apply(input, at::IntArrayRef(options.normalized_shape()), weight,
                                  maybe(bias), options.eps(), held);
}

}  // namespace yoke::parallel
