// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/matvec.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

namespace yoke::parallel {
namespace {

constexpr int64_t kWorthIt = 1 << 16;  // weights

}  // namespace

bool is_matvec(const at::Tensor& input, const at::Tensor& weight) {
  const int64_t threads = at::get_num_threads();
  return input.is_cpu() && input.numel() == input.size(-1) && !at::GradMode::is_enabled() &&
         input.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && threads > 1 &&
         weight.numel() >= kWorthIt && weight.size(0) >= threads && weight.stride(1) == 1;
}

at::Tensor matvec(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const int64_t parts = at::get_num_threads(), outputs = weight.size(0), inputs = weight.size(1);
  const int64_t each = outputs / parts, even = parts * each;
  auto shape = input.sizes().vec();
  shape.back() = outputs;
  at::Tensor result = at::empty({outputs}, input.options());
  const at::Tensor x = input.reshape({inputs}), cut = weight.narrow(0, 0, even);
  at::Tensor to = result.narrow(0, 0, even).view({parts, each, 1});
  // As a row turned round: from the strides MKL chooses its way, and another takes 3 times as long.
  at::bmm_out(to, cut.view({parts, each, inputs}),
              x.view({1, 1, inputs}).transpose(1, 2).expand({parts, -1, -1}));
  if (even < outputs) {
    at::Tensor rest = result.narrow(0, even, outputs - even);
    at::mv_out(rest, weight.narrow(0, even, outputs - even), x);
  }
  if (bias) result.add_(*bias);
  return result.view(shape);
}

}  // namespace yoke::parallel
