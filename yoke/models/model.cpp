// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/model.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "yoke/base/rng.h"

namespace yoke::models {

void draw(at::Tensor parameter, uint64_t seed, const std::string& name, double scale) {
  const at::NoGradGuard no_grad;
  if (scale == 0) {
    parameter.zero_();
    return;
  }
  const Rng rng(seed, name);
  const at::Tensor values = at::empty(parameter.sizes(), at::kFloat);
  auto* data = values.mutable_data_ptr<float>();
  at::parallel_for(0, values.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) data[i] = float(scale * rng.normal(uint64_t(i)));
  });
  parameter.copy_(values);
}

}  // namespace yoke::models
