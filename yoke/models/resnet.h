// SPDX-License-Identifier: Apache-2.0
// Residual networks (He et al., 2016) of 18, 34 or 50 layers. Images up to 64 pixels wide begin
// with a 3x3 convolution, larger ones with a 7x7 one and pooling, as the paper has it. Norms are
// over the batch of all replicas, or with `local` of a rank's own samples. Input: [batch, channels,
// height, width].
#pragma once

#include "yoke/models/model.h"

namespace yoke::models {

struct ResnetOptions {
  int64_t depth = 18, width = 64;  // features of the first blocks
  int64_t channels = 3, size = 224, classes = 1000;
  bool local = false;
  uint64_t seed = 1;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Init init = nullptr;
};

Model make_resnet(const ResnetOptions& options);

}  // namespace yoke::models
