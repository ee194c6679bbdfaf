// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/tensor_axis.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(const TensorAxis& axis) : axis(axis) {}
  const TensorAxis axis;
};
using Held = c10::intrusive_ptr<Holder>;

const TensorAxis& kept(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Holder>(context->saved_data["axis"].toCapsule())->axis;
}

at::Tensor own_tokens(const at::Tensor& all, const TensorAxis& axis) {
  const int64_t count = axis.part_of(all.size(-2), "tokens");
  return all.narrow(-2, axis.rank() * count, count).contiguous();
}

struct Scatter : torch::autograd::Function<Scatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& all, const Held& held) {
    context->saved_data["axis"] = c10::IValue::make_capsule(held);
    return own_tokens(all, held->axis);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gather_tokens(gradients[0], kept(context)).wait(), {}};
  }
};

struct Collect : torch::autograd::Function<Collect> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& mine, const Held& held) {
    context->saved_data["axis"] = c10::IValue::make_capsule(held);
    return gather_tokens(mine, held->axis).wait();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {own_tokens(gradients[0], kept(context)), {}};  // all ranks go on with the same
  }
};

}  // namespace

int64_t TensorAxis::part_of(int64_t whole, const char* what) const {
  if (whole % size() != 0)
    fail(Kind::Usage, whole, " ", what, " cannot be cut into ", size(),
         " equal parts: tp must divide them");
  return whole / size();
}

at::Tensor Gathering::wait() {
  work.wait();
  auto sizes = all.sizes().vec();
  const int64_t ranks = sizes[0];
  sizes.erase(sizes.begin());
  sizes[sizes.size() - 2] *= ranks;
  return all.movedim(0, -3).reshape(sizes);
}

Gathering gather_tokens(const at::Tensor& mine, const TensorAxis& axis) {
  auto sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), axis.size());
  Gathering gathering{.all = at::empty(sizes, mine.options())};
  gathering.work = axis.group.all_gather(gathering.all, mine.contiguous());
  return gathering;
}

Reduction reduce_partial(at::Tensor partial, const TensorAxis& axis) {
  if (!axis.scatters()) {
    partial = partial.contiguous();
    return {partial, axis.size() > 1 ? axis.group.all_reduce(partial) : comm::Work()};
  }
  auto sizes = partial.sizes().vec();
  const auto dim = sizes.size() - 2;
  sizes[dim] = axis.part_of(sizes[dim], "tokens");
  Reduction reduction{.result = at::empty(sizes, partial.options())};
  sizes.insert(sizes.begin() + long(dim), axis.size());
  reduction.work = axis.group.reduce_scatter(reduction.result,
                                             partial.reshape(sizes).movedim(-3, 0).contiguous());
  return reduction;
}

at::Tensor scatter_tokens(const at::Tensor& all, const TensorAxis& axis) {
  return axis.scatters() ? Scatter::apply(all, c10::make_intrusive<Holder>(axis)) : all;
}

at::Tensor collect_tokens(const at::Tensor& mine, const TensorAxis& axis) {
  return axis.scatters() ? Collect::apply(mine, c10::make_intrusive<Holder>(axis)) : mine;
}

void check_words(const at::Tensor& indices, int64_t words, std::optional<int64_t> ignored) {
  const at::NoGradGuard no_grad;
  at::Tensor wrong = (indices < 0).logical_or_(indices >= words);
  if (ignored) wrong.logical_and_(indices != *ignored);
  if (!indices.is_cpu()) return at::_assert_async(wrong.any().logical_not());
  if (wrong.any().item<bool>())
    fail(Kind::Usage, "there is no word ", indices.masked_select(wrong)[0].item<int64_t>(),
         " among ", words);
}

}  // namespace yoke::parallel
