// SPDX-License-Identifier: Apache-2.0
// Residual layers x + down(gelu(up(x))) for vectors. Input and target: [batch, dim], and the loss
// is the mean squared distance. With `classes` it sorts samples of any shape: a layer before makes
// them `dim` and one after gives the classes.
#pragma once

#include "yoke/models/model.h"

namespace yoke::models {

struct MlpOptions {
  int64_t layers = 4, dim = 64;
  int64_t ffn = 0;                   // 0: 4 x dim
  std::vector<int64_t> sample = {};  // its shape; empty: vectors to vectors
  int64_t classes = 0;
  uint64_t seed = 1;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Init init = nullptr;
};

Model make_mlp(const MlpOptions& options);

}  // namespace yoke::models
