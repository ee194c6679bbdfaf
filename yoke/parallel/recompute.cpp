// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/recompute.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "yoke/base/error.h"
#include "yoke/parallel/autocast.h"
#include "yoke/parallel/passing.h"

namespace yoke::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Part = std::function<at::Tensor(const at::Tensor&)>;

struct Holder : torch::CustomClassHolder {
  explicit Holder(Part fn) : fn(std::move(fn)) {}
  const Part fn;
  const Passing passing = Passing::current();
};

// `anchor` requires a gradient, so that backward comes even if the input requires none.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<Holder>& holder) {
    const at::AutoGradMode off(false);
    const at::DeviceType device = input.device().type();
    context->saved_data["fn"] = c10::IValue::make_capsule(holder);
    context->saved_data["autocast"] = at::autocast::is_autocast_enabled(device);
    context->saved_data["dtype"] = at::autocast::get_autocast_dtype(device);
    context->save_for_backward({input});
    return holder->fn(input);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto holder =
        c10::static_intrusive_pointer_cast<Holder>(context->saved_data["fn"].toCapsule());
    const at::Tensor saved = context->get_saved_variables()[0];
    const at::AutoGradMode on(true);
    const at::Tensor input = saved.detach();
    const bool wanted = saved.requires_grad() && at::isFloatingType(saved.scalar_type());
    if (wanted) input.requires_grad_(true);
    at::Tensor output;
    {
      const Autocast as_before(input.device().type(), context->saved_data["autocast"].toBool(),
                               context->saved_data["dtype"].toScalarType());
      const Passing::Scope again(holder->passing);
      output = holder->fn(input);
    }
    if (output.requires_grad()) torch::autograd::backward({output}, {gradients[0]});
    return {wanted ? input.grad() : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor recompute(const Part& fn, const at::Tensor& input) {
  if (!at::GradMode::is_enabled()) return fn(input);
  const at::Tensor anchor = at::empty({0}, input.options().dtype(at::kFloat)).requires_grad_(true);
  return Recompute::apply(input, anchor, c10::make_intrusive<Holder>(fn));
}

at::Tensor checkpoint(Checkpointing checkpointing, int64_t part, const Part& fn,
                      const at::Tensor& input) {
  const bool again = checkpointing == Checkpointing::Full ||
                     (checkpointing == Checkpointing::Selective && part % 2 == 0);
  return again ? recompute(fn, input) : fn(input);
}

at::Tensor dropout(const at::Tensor& x, double probability, const Rng& rng, int64_t first) {
  return dropout(x, probability, rng, {0, 0, x.dim() > 0 ? x.size(0) : 1}, first);
}

at::Tensor dropout(const at::Tensor& x, double probability, const Rng& rng, Window window,
                   int64_t first) {
  if (!(probability >= 0 && probability < 1))
    fail(Kind::Usage, "dropout wants a probability of 0 to below 1, got ", probability);
  if (probability == 0) return x;
  // Runs of elements that are neighbours in the whole too.
  const int64_t dim = x.dim() == 0 ? 0 : at::maybe_wrap_dim(window.dim, x.dim());
  int64_t inner = 1;
  for (int64_t d = dim + 1; d < x.dim(); ++d) inner *= x.size(d);
  const int64_t run = x.dim() == 0 ? 1 : x.size(dim) * inner, stride = window.whole * inner;
  if (window.begin < 0 || window.begin * inner + run > stride)
    fail(Kind::Usage, "a part of ", run / inner, " from ", window.begin,
         " on does not lie in a whole of ", window.whole);
  const at::Tensor kept = at::empty(x.sizes(), at::kFloat);
  auto* data = kept.mutable_data_ptr<float>();
  const float scale = float(1 / (1 - probability));
  at::parallel_for(0, x.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = i / run * stride + window.begin * inner + i % run;
      data[i] = double(rng.uniform(uint64_t(first + place))) < probability ? 0 : scale;
    }
  });
  return x * kept.to(x.options());
}

}  // namespace yoke::parallel
