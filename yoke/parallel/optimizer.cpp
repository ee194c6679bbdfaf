// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

// The parameter among this rank's shards whose gradient is not finite; empty: another rank's.
std::string culprit_of(const DataParallel::Reduced& reduced, const plan::Layout& layout) {
  for (const auto& part : reduced.parts)
    for (const auto& piece : part.pieces)
      if (!at::isfinite(part.gradients.narrow(0, piece.offset, piece.count)).all().item<bool>())
        return layout.parameters[size_t(piece.parameter)].name;
  return "";
}

void check_beta(const char* name, double beta) {
  if (!(beta >= 0 && beta < 1))
    fail(Kind::Usage, name, " is a number from 0 to below 1, got ", beta);
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
  const auto reduced = dp_.reduced(/*exact=*/std::isfinite(options_.clip));
  // A rank of a pipeline may have none.
  const at::ScalarType type =
      reduced.parts.empty() ? at::kFloat : reduced.parts[0].weights.scalar_type();
  const at::Tensor divisor = reduced.count * dp_.loss_scale().value;
  at::Tensor norm = reduced.squares.sqrt() / divisor;
  if (type != at::kDouble) norm = norm.to(at::kFloat).to(at::kDouble);
  const at::Tensor scale =
      std::isinf(options_.clip) ? divisor : divisor / (options_.clip / (norm + 1e-6)).clamp_max(1);

  StepInfo info{.step = step_ + 1, .lr = options_.lr};
  info.numbers = Readback(at::stack({norm, reduced.count, reduced.mismatch.to(at::kDouble)}));
  const bool waits = norm.is_cpu() || dp_.options().precision == Precision::Fp16;
  info.skipped = waits && info.count() > 0 && !info.mismatch() &&
                 !std::isfinite(info.grad_norm()) &&
                 (dp_.loss_scale().value > 1 || options_.skip_bad);
  if (info.skipped) {
    dp_.stepped(/*updated=*/false);
    return info;
  }
  auto verdict = [info, skips = options_.skip_bad](const std::string& culprit) {
    if (info.mismatch())
      fail(Kind::Usage, "in step ", info.step,
           " the ranks have gathered other parameters, or in another order; under ZeRO 3 every "
           "rank uses the same ones in each pass: evaluate inside gathered(), and choose another "
           "stage for a model whose ranks take different branches");
    if (info.count() <= 0)
      fail(Kind::Usage, "a step over no samples: the counts given to backward() add up to ",
           info.count(), " over all ranks");
    if (!std::isfinite(info.grad_norm()) && !skips)
      fail(Kind::Internal, "the gradient norm of step ", info.step, " is ", info.grad_norm(),
           culprit.empty() ? "" : cat("; the gradient of '", culprit, "' is not finite"),
           "; the parameters are still those of the step before: lower the learning rate, clip "
           "the gradient, or look at the data of this step");
  };
  Scaling scaling;
  if (waits) {
    const bool finite = std::isfinite(info.grad_norm());
    const std::string culprit = finite ? "" : culprit_of(reduced, dp_.layout());
    try {
      verdict(culprit);
    } catch (...) {
      dp_.stepped(/*updated=*/false);
      throw;
    }
  } else {
    const at::Tensor bad = at::isfinite(norm).logical_not_().logical_or_(reduced.mismatch);
    scaling.found_inf = bad.to(at::kFloat);
  }
  make_state(reduced.parts);
  if (used_ != reduced.used) plan_batches(reduced);
  if (type == at::kDouble)  // the fused updates take a float32
    for (const auto& part : reduced.parts) part.gradients.div_(scale);
  else
    scaling.divisor = scale.to(at::kFloat);
  if (scaling.found_inf.defined())
    num_bad_ = num_bad_.defined() ? num_bad_ + scaling.found_inf : scaling.found_inf;
  for (auto& batch : batches_) {
    at::_foreach_add_(batch.steps, 1);
    update(batch, scaling);
    if (scaling.found_inf.defined()) at::_foreach_add_(batch.steps, scaling.found_inf, -1);
  }
  for (size_t p = 0; p < used_.size(); ++p) num_steps_[p] += used_[p];
  ++step_;
  dp_.stepped(/*updated=*/true, waits ? std::function<void()>() : [verdict] { verdict(""); });
  return info;
}

void Optimizer::make_state(const std::vector<DataParallel::Part>& parts) {
  num_steps_.resize(dp_.layout().parameters.size(), 0);
  for (const auto& name : state_names_) {
    auto& tensors = state_[name];
    tensors.resize(parts.size());
    for (size_t b = 0; b < parts.size(); ++b)  // buckets may have changed before the first step
      if (!tensors[b].defined() || tensors[b].numel() != parts[b].weights.numel())
        tensors[b] = at::zeros_like(parts[b].weights);
  }
}

const Optimizer::State& Optimizer::state() {
  make_state(dp_.parts());
  return state_;
}

// What the GPU has left out is not counted.
void Optimizer::settle_steps() {
  if (!num_bad_.defined()) return;
  const auto bad = num_bad_.item<int64_t>();
  for (size_t p = 0; p < used_.size(); ++p) num_steps_[p] -= used_[p] * bad;
  num_bad_.reset();
}

const std::vector<int64_t>& Optimizer::parameter_steps() {
  make_state(dp_.parts());
  settle_steps();
  return num_steps_;
}

void Optimizer::restored(int64_t num_steps, std::vector<int64_t> parameter_steps) {
  YOKE_CHECK(parameter_steps.size() == dp_.layout().parameters.size());
  step_ = num_steps;
  num_steps_ = std::move(parameter_steps);
  num_bad_.reset();
  used_.clear();  // the batches are made anew
}

// Neighbours that are treated alike are one run of memory, with what lies between them and up to
// the next multiple of kAlign: so arithmetic rounds alike wherever a parameter lies.
void Optimizer::plan_batches(const DataParallel::Reduced& reduced) {
  settle_steps();
  used_ = reduced.used;
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
    : Optimizer(dp, options, {"exp_avg", "exp_avg_sq"}),
      beta1_(options.beta1),
      beta2_(options.beta2),
      eps_(options.eps) {
  check_beta("beta1", beta1_);
  check_beta("beta2", beta2_);
  if (!(eps_ >= 0)) fail(Kind::Usage, "eps is 0 or more, got ", eps_);
}

void AdamW::update(const Batch& batch, const Scaling& scaling) {
  at::_fused_adamw_(batch.weights, batch.gradients, batch.state[0], batch.state[1], {}, batch.steps,
                    options_.lr, beta1_, beta2_, batch.weight_decay, eps_, /*amsgrad=*/false,
                    /*maximize=*/false, optional(scaling.divisor), optional(scaling.found_inf));
}

Sgd::Sgd(DataParallel& dp, SgdOptions options)
    : Optimizer(
          dp, options,
          options.momentum > 0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{}),
      momentum_(options.momentum),
      nesterov_(options.nesterov) {
  check_beta("momentum", momentum_);
  if (nesterov_ && momentum_ <= 0)
    fail(Kind::Usage, "Nesterov's SGD wants a momentum above 0, got ", momentum_);
}

void Sgd::update(const Batch& batch, const Scaling& scaling) {
  const std::vector<at::Tensor> none;
  at::_fused_sgd_(batch.weights, batch.gradients, batch.state.empty() ? none : batch.state[0],
                  batch.weight_decay, momentum_, options_.lr, /*dampening=*/0, nesterov_,
                  /*maximize=*/false, /*is_first_step=*/false, optional(scaling.divisor),
                  optional(scaling.found_inf));
}

Lion::Lion(DataParallel& dp, LionOptions options)
    : Optimizer(dp, options, {"exp_avg"}), beta1_(options.beta1), beta2_(options.beta2) {
  check_beta("beta1", beta1_);
  check_beta("beta2", beta2_);
}

void Lion::update(const Batch& batch, const Scaling& scaling) {
  if (scaling.found_inf.defined() && scaling.found_inf.item<float>() != 0) return;  // waits
  for (size_t i = 0; i < batch.weights.size(); ++i) {
    const at::Tensor &weight = batch.weights[i], &gradient = batch.gradients[i],
                     &momentum = batch.state[0][i];
    if (scaling.divisor.defined()) gradient.div_(scaling.divisor);
    weight.mul_(1 - options_.lr * batch.weight_decay);
    weight.sub_(at::lerp(gradient, momentum, beta1_).sign_(), options_.lr);
    momentum.lerp_(gradient, 1 - beta2_);
  }
}

}  // namespace yoke::parallel
