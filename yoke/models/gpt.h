// SPDX-License-Identifier: Apache-2.0
// GPT-2's form (Radford et al., 2019): words and learnt positions, blocks of causal attention and a
// GELU layer with norms before them, a head tied to the words. Input and target: [batch, seq]
// words.
#pragma once

#include "yoke/models/model.h"
#include "yoke/parallel/recompute.h"

namespace yoke::models {

struct GptOptions {
  int64_t layers = 12, dim = 768, heads = 12, vocab = 50257, seq = 1024;
  int64_t ffn = 0;  // 0: 4 x dim
  uint64_t seed = 1;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  parallel::Checkpointing recompute = parallel::Checkpointing::None;
  Init init = nullptr;
};

Model make_gpt(const GptOptions& options);

}  // namespace yoke::models
