// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/cross_entropy.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "yoke/base/error.h"
#include "yoke/parallel/kernels.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Over the ranks of an axis.
struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const at::Tensor& targets, int64_t ignored, const TensorAxis& axis) {
    const at::Tensor logits = given.to(at::toOpMathType(given.scalar_type()));
    const int64_t words = logits.size(1);
    check_words(targets, words * axis.size(), ignored);
    const at::Tensor largest = std::get<0>(logits.max(1));
    axis.group.all_reduce(largest, comm::ReduceOp::Max).wait();
    const at::Tensor shifted = logits - largest.unsqueeze(1);
    const at::Tensor place = targets - axis.rank() * words;
    const at::Tensor elsewhere = (place < 0).logical_or(place >= words);
    const at::Tensor index = place.masked_fill(elsewhere, 0).unsqueeze(1);
    const at::Tensor wanted = shifted.gather(1, index).squeeze(1).masked_fill(elsewhere, 0);
    const at::Tensor exponents = shifted.exp();
    const at::Tensor sums = at::stack({exponents.sum(1), wanted});
    axis.group.all_reduce(sums).wait();
    const at::Tensor counts = targets != ignored;
    context->saved_data["dtype"] = given.scalar_type();
    context->save_for_backward({exponents / sums[0].unsqueeze(1), index,
                                elsewhere.logical_not().logical_and(counts), counts});
    return ((sums[0].log() - sums[1]) * counts).sum();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    at::Tensor dx = saved[0] * saved[3].unsqueeze(1);
    dx.scatter_add_(1, saved[1], -saved[2].unsqueeze(1).to(dx.scalar_type()));
    return {(dx * gradients[0]).to(context->saved_data["dtype"].toScalarType()), {}, {}, {}};
  }
};

// Loss and gradient in one go, the gradient where the logits were.
struct FusedCrossEntropy : torch::autograd::Function<FusedCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, int64_t ignored, bool to_gradient) {
    check_words(targets, logits.size(1), ignored);
    const at::Tensor losses = fused_cross_entropy(logits, targets, ignored, to_gradient);
    if (to_gradient)
      logits.unsafeGetTensorImpl()->bump_version();  // whoever has saved them is told
    context->save_for_backward({logits.detach()});
    return losses.sum();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled() || context->saved_data.count("used") > 0)
      fail(Kind::Usage, "the cross entropy has one backward, and that no gradient");
    context->saved_data["used"] = true;
    const at::Tensor gradient = context->get_saved_variables()[0];
    multiply_unless_one(gradient, gradients[0]);
    return {gradient, {}, {}, {}};
  }
};

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const TensorAxis& axis, int64_t ignored) {
  if (axis.size() > 1) return CrossEntropy::apply(logits, targets, ignored, axis);
  // In float16 a gradient must be multiplied with the loss scale before it is rounded.
  const bool wanted = at::GradMode::is_enabled() && logits.requires_grad();
  if (has_kernels(logits) && !(wanted && logits.scalar_type() == at::kHalf))
    return FusedCrossEntropy::apply(logits, targets, ignored, wanted);
  // A sum over many tokens is out of the reach of 16 bits.
  return at::cross_entropy_loss(logits.to(at::toOpMathType(logits.scalar_type())), targets, {},
                                at::Reduction::Sum, ignored);
}

}  // namespace yoke::parallel
