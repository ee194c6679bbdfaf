// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

// In float64, which is far more exact than the float32 that the norm is rounded to: so it is the
// same however the gradients are cut into shards.
at::Tensor sum_of_squares(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.scalar_type() != at::kFloat) {
    const at::Tensor norm = at::linalg_vector_norm(tensor, 2, {}, false, at::kDouble);
    return norm * norm;
  }
  // LibTorch would make a float64 copy first.
  constexpr int64_t kLanes = 16;
  static_assert(plan::kAlign % kLanes == 0);
  std::array<double, kLanes> sums{};
  const auto* values = tensor.const_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[size_t(lane)] += value * value;
    }
  return at::full({}, std::accumulate(sums.begin(), sums.end(), 0.0), at::kDouble);
}

}  // namespace

Optimizer::Optimizer(DataParallel& dp, OptimizerOptions options,
                     std::vector<std::string> state_names)
    : dp_(dp), options_(std::move(options)), state_names_(std::move(state_names)) {
  if (!(options_.lr >= 0) || !(options_.weight_decay >= 0) || !(options_.clip > 0))
    fail(Kind::Usage, "an optimizer wants lr and weight_decay of 0 or more and clip above 0, got ",
         options_.lr, ", ", options_.weight_decay, " and ", options_.clip);
}

StepInfo Optimizer::step() {
  const at::NoGradGuard no_grad;
  const auto reduced = dp_.reduced();
  at::Tensor squares = at::zeros({}, reduced.parts[0].shard.options().dtype(at::kDouble));
  for (const auto& part : reduced.parts) squares += sum_of_squares(part.shard);
  dp_.comm().all_reduce(squares).wait();

  const double divisor = reduced.count * dp_.loss_scale();
  StepInfo info{.step = step_ + 1, .count = reduced.count, .lr = options_.lr};
  info.grad_norm = std::sqrt(squares.item<double>()) / divisor;
  const at::ScalarType type = reduced.parts[0].weights.scalar_type();
  if (type != at::kDouble) info.grad_norm = float(info.grad_norm);
  if (!std::isfinite(info.grad_norm)) {
    if (dp_.options().precision != Precision::Fp16 || dp_.loss_scale() <= 1)
      not_finite(reduced, info.grad_norm);
    info.skipped = true;
    dp_.stepped(/*updated=*/false);
    return info;
  }
  const double clipped = std::min(1.0, options_.clip / (info.grad_norm + 1e-6));
  const double scale = divisor / clipped;
  if (state_.empty())
    for (const auto& name : state_names_)
      for (const auto& part : reduced.parts) state_[name].push_back(at::zeros_like(part.weights));
  if (used_ != reduced.used) plan_batches(reduced);
  at::Tensor factor;
  if (type == at::kDouble) {  // the fused updates take a float32
    if (scale != 1)
      for (const auto& part : reduced.parts) part.gradients.div_(scale);
  } else if (scale != 1) {
    factor = at::full({}, scale, squares.options().dtype(at::kFloat));
  }
  for (auto& batch : batches_) {
    at::_foreach_add_(batch.steps, 1);
    update(batch, factor);
  }
  for (size_t p = 0; p < used_.size(); ++p) num_steps_[p] += used_[p];
  ++step_;
  dp_.stepped(/*updated=*/true);
  return info;
}

// Neighbours that are treated alike are one run of memory, with what lies between them and up to
// the next multiple of kAlign: so arithmetic rounds alike wherever a parameter lies.
void Optimizer::plan_batches(const DataParallel::Reduced& reduced) {
  used_ = reduced.used;
  num_steps_.resize(used_.size(), 0);
  batches_.clear();
  for (size_t b = 0; b < reduced.parts.size(); ++b) {
    const auto& part = reduced.parts[b];
    for (size_t i = 0; i < part.pieces.size();) {
      auto treatment = [&](const plan::Piece& piece) {
        const auto p = size_t(piece.parameter);
        return std::tuple(bool(used_[p]), num_steps_[p],
                          options_.decays(dp_.layout().parameters[p]));
      };
      size_t end = i + 1;
      while (end < part.pieces.size() && treatment(part.pieces[end]) == treatment(part.pieces[i]))
        ++end;
      const auto [used, steps, decays] = treatment(part.pieces[i]);
      const int64_t begin = part.pieces[i].offset;
      const int64_t last = part.pieces[end - 1].offset + part.pieces[end - 1].count;
      const int64_t count = (last - begin + plan::kAlign - 1) / plan::kAlign * plan::kAlign;
      i = end;
      if (!used) continue;
      const double decay = decays ? options_.weight_decay : 0;
      auto batch = std::ranges::find(batches_, decay, &Batch::weight_decay);
      if (batch == batches_.end()) {
        batches_.push_back({.weight_decay = decay});
        batch = batches_.end() - 1;
        batch->state.resize(state_names_.size());
      }
      batch->weights.push_back(part.weights.narrow(0, begin, count));
      batch->gradients.push_back(part.gradients.narrow(0, begin, count));
      batch->steps.push_back(at::full({}, double(steps), part.weights.options().dtype(at::kFloat)));
      for (size_t s = 0; s < state_names_.size(); ++s)
        batch->state[s].push_back(state_[state_names_[s]][b].narrow(0, begin, count));
    }
  }
}

void Optimizer::not_finite(const DataParallel::Reduced& reduced, double norm) const {
  std::string culprit;  // among this rank's shards
  for (const auto& part : reduced.parts)
    for (const auto& piece : part.pieces)
      if (culprit.empty() &&
          !at::isfinite(part.gradients.narrow(0, piece.offset, piece.count)).all().item<bool>())
        culprit = dp_.layout().parameters[size_t(piece.parameter)].name;
  fail(Kind::Internal, "the gradient norm of step ", step_ + 1, " is ", norm,
       culprit.empty() ? "" : cat("; the gradient of '", culprit, "' is not finite"),
       "; the parameters are still those of the step before: lower the learning rate, clip the "
       "gradient, or look at the data of this step");
}

int64_t Optimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, tensors] : state_)
    for (const auto& tensor : tensors) bytes += int64_t(tensor.nbytes());
  return bytes;
}

namespace {

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

AdamW::AdamW(DataParallel& dp, AdamWOptions options)
    : Optimizer(dp, options, {"exp_avg", "exp_avg_sq"}), adam_(std::move(options)) {}

void AdamW::update(const Batch& batch, const at::Tensor& scale) {
  at::_fused_adamw_(batch.weights, batch.gradients, batch.state[0], batch.state[1], {}, batch.steps,
                    options_.lr, adam_.beta1, adam_.beta2, batch.weight_decay, adam_.eps,
                    /*amsgrad=*/false, /*maximize=*/false, optional(scale));
}

Sgd::Sgd(DataParallel& dp, SgdOptions options)
    : Optimizer(
          dp, options,
          options.momentum > 0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{}),
      sgd_(std::move(options)) {
  if (sgd_.nesterov && sgd_.momentum <= 0)
    fail(Kind::Usage, "Nesterov's SGD wants a momentum above 0, got ", sgd_.momentum);
}

void Sgd::update(const Batch& batch, const at::Tensor& scale) {
  const std::vector<at::Tensor> none;
  at::_fused_sgd_(batch.weights, batch.gradients, batch.state.empty() ? none : batch.state[0],
                  batch.weight_decay, sgd_.momentum, options_.lr, /*dampening=*/0, sgd_.nesterov,
                  /*maximize=*/false, /*is_first_step=*/false, optional(scale));
}

Lion::Lion(DataParallel& dp, LionOptions options)
    : Optimizer(dp, options, {"exp_avg"}), lion_(std::move(options)) {}

void Lion::update(const Batch& batch, const at::Tensor& scale) {
  for (size_t i = 0; i < batch.weights.size(); ++i) {
    const at::Tensor &weight = batch.weights[i], &gradient = batch.gradients[i],
                     &momentum = batch.state[0][i];
    if (scale.defined()) gradient.div_(scale);
    weight.mul_(1 - options_.lr * batch.weight_decay);
    weight.sub_(at::lerp(gradient, momentum, lion_.beta1).sign_(), options_.lr);
    momentum.lerp_(gradient, 1 - lion_.beta2);
  }
}

}  // namespace yoke::parallel
