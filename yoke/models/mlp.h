// SPDX-License-Identifier: Apache-2.0
// Residual layers x + down(gelu(up(x))) for vectors. Input and target: [batch, dim]; the loss is
// the mean squared distance.
#pragma once

#include "yoke/models/model.h"

namespace yoke::models {

struct MlpOptions {
  int64_t layers = 4, dim = 64;
  int64_t ffn = 0;  // 0: 4 x dim
  uint64_t seed = 1;
  at::Device device = at::kCPU;
};

Model make_mlp(const MlpOptions& options);

}  // namespace yoke::models
