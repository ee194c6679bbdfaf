// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/batch_norm.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(const comm::Communicator& comm) : comm(comm) {}
  const comm::Communicator comm;
};

at::Tensor sum_over_batch(const at::Tensor& x) { return x.transpose(0, 1).flatten(1).sum(1); }

// [features] in the shape that broadcasts over x.
at::Tensor along(const at::Tensor& values, const at::Tensor& x) {
  std::vector<int64_t> shape(size_t(x.dim()), 1);
  shape[1] = -1;
  return values.view(shape);
}

// Normalises with the mean and variance of all ranks.
struct Normalise : torch::autograd::Function<Normalise> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input, double eps,
                               const c10::intrusive_ptr<Holder>& holder) {
    const auto& comm = holder->comm;
    const at::Tensor x = input.to(at::toOpMathType(input.scalar_type()));
    // Each rank's mean and sum of squares around it, put together as if seen one after the other:
    // more exact than sums of squares (Chan et al., 1979).
    const double n = double(x.numel() / x.size(1));
    const at::Tensor own_mean = sum_over_batch(x) / n;
    const at::Tensor own_squares = sum_over_batch((x - along(own_mean, x)).square());
    const at::Tensor mine =
        at::cat({own_mean, own_squares, at::full({1}, n, x.options())}).to(at::kDouble);
    const at::Tensor all = at::empty({comm.size() * mine.numel()}, mine.options());
    comm.all_gather(all, mine).wait();
    const at::Tensor rows = all.view({comm.size(), -1});
    const int64_t features = x.size(1);
    const at::Tensor means = rows.narrow(1, 0, features),
                     squares = rows.narrow(1, features, features), counts = rows.select(1, -1);
    const at::Tensor count = counts.sum();
    const at::Tensor mean = (means * counts.unsqueeze(1)).sum(0) / count;
    const at::Tensor var = (squares + (means - mean).square() * counts.unsqueeze(1)).sum(0) / count;
    const at::Tensor scale = (var + eps).rsqrt().to(x.scalar_type());
    const at::Tensor y = (x - along(mean.to(x.scalar_type()), x)) * along(scale, x);
    context->saved_data["comm"] = c10::IValue::make_capsule(holder);
    context->save_for_backward({y, scale, count});
    context->mark_non_differentiable({mean, var, count});
    return {y, mean, var, count};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto holder =
        c10::static_intrusive_pointer_cast<Holder>(context->saved_data["comm"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor &y = saved[0], &scale = saved[1], &count = saved[2], &dy = gradients[0];
    const at::Tensor sums = at::cat({sum_over_batch(dy), sum_over_batch(dy * y)}).to(at::kDouble);
    holder->comm.all_reduce(sums).wait();
    const at::Tensor means = (sums / count).to(y.scalar_type());
    const int64_t features = y.size(1);
    const at::Tensor dx = (dy - along(means.narrow(0, 0, features), y) -
                           y * along(means.narrow(0, features, features), y)) *
                          along(scale, y);
    return {dx, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

BatchNorm::BatchNorm(const BatchNormOptions& options, const comm::Communicator& comm)
    : options_(options),
      comm_(comm && comm.size() > 1 ? comm.split(0, comm.rank()) : comm::Communicator()) {
  if (options.features <= 0)
    fail(Kind::Usage, "BatchNorm wants the number of features, got ", options.features);
  weight = register_parameter("weight", at::ones({options.features}));
  bias = register_parameter("bias", at::zeros({options.features}));
  running_mean = register_buffer("running_mean", at::zeros({options.features}));
  running_var = register_buffer("running_var", at::ones({options.features}));
}

at::Tensor BatchNorm::forward(const at::Tensor& x) {
  if (!is_training() || !comm_) {
    const auto kind = running_mean.scalar_type();  // weights may have fewer bits
    return at::batch_norm(x, weight.to(kind), bias.to(kind), running_mean, running_var,
                          is_training(), options_.momentum, options_.eps, false);
  }
  const auto results = Normalise::apply(x, options_.eps, c10::make_intrusive<Holder>(comm_));
  {
    const at::NoGradGuard no_grad;
    const at::Tensor &mean = results[1], &var = results[2], &count = results[3];
    const auto kind = running_mean.scalar_type();
    running_mean.lerp_(mean.to(kind), options_.momentum);
    running_var.lerp_((var * (count / (count - 1))).to(kind), options_.momentum);
  }
  return (results[0] * along(weight, x) + along(bias, x)).to(x.scalar_type());
}

}  // namespace yoke::parallel
