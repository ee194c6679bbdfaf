// SPDX-License-Identifier: Apache-2.0
// The vision transformer (Dosovitskiy et al., 2021): patches of an image and a class token, learnt
// positions, blocks of attention, and a head on the class token. Input: [batch, channels, size,
// size].
#pragma once

#include "yoke/models/model.h"
#include "yoke/parallel/recompute.h"

namespace yoke::models {

struct VitOptions {
  int64_t layers = 12, dim = 768, heads = 12;
  int64_t ffn = 0;  // 0: 4 x dim
  int64_t patch = 16, channels = 3, size = 224, classes = 1000;
  uint64_t seed = 1;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  parallel::Checkpointing recompute = parallel::Checkpointing::None;
  Init init = nullptr;
};

Model make_vit(const VitOptions& options);

}  // namespace yoke::models
