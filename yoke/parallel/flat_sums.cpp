// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/flat_sums.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>

#include <array>
#include <numeric>

#include "yoke/plan/layout.h"

namespace yoke::parallel {

at::Tensor sum_of_squares(const at::Tensor& tensor, bool exact) {
  if (!tensor.is_cpu()) {  // float32 for runs that lie in one shard whole, float64 for the rest
    const auto type = at::toOpMathType(tensor.scalar_type());
    const at::Tensor runs = tensor.view({exact ? -1 : 1, exact ? plan::kAlign : tensor.numel()});
    return at::linalg_vector_norm(runs, 2, {{1}}, false, type).to(at::kDouble).square().sum();
  }
  if (tensor.scalar_type() != at::kFloat)
    return at::linalg_vector_norm(tensor, 2, {}, false, at::kDouble).square();
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

at::Tensor checksum(const at::Tensor& flat) {
  const int width = int(flat.element_size());
  const at::Tensor bits = flat.view(width == 8 ? at::kLong : width == 4 ? at::kInt : at::kShort);
  constexpr int64_t kColumns = 1021;
  const int64_t rows = flat.numel() / kColumns, rest = flat.numel() % kColumns;
  const at::Tensor columns =
      bits.narrow(0, 0, rows * kColumns).view({rows, kColumns}).sum(0, false, at::kLong);
  columns.narrow(0, 0, rest) += bits.narrow(0, rows * kColumns, rest).to(at::kLong);
  return (columns * at::arange(1, kColumns + 1, columns.options())).sum();
}

}  // namespace yoke::parallel
