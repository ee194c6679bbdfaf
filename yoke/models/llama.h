// SPDX-License-Identifier: Apache-2.0
// Llama's form (Touvron et al., 2023; Llama 3; Qwen2 with qkv_bias): words, blocks of causal
// attention with rotary positions and shared keys and values, and a gated layer, with root mean
// square norms before them and no other biases, a head of its own or tied to the words. Input and
// target: [batch, seq] words.
#pragma once

#include "yoke/models/model.h"
#include "yoke/parallel/recompute.h"
#include "yoke/parallel/rotary.h"

namespace yoke::models {

struct LlamaOptions {
  int64_t layers = 16, dim = 2048, heads = 32, vocab = 128256, seq = 2048;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: dim / heads
  int64_t ffn = 0;       // 0: 8/3 x dim, up to the next multiple of 64
  bool tied = false;     // the head is the words
  bool qkv_bias = false;
  double eps = 1e-5;
  parallel::RotaryOptions rotary = {.base = 10000};
  uint64_t seed = 1;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  parallel::Checkpointing recompute = parallel::Checkpointing::None;
  Init init = nullptr;
};

int64_t usual_ffn(int64_t dim);

Model make_llama(const LlamaOptions& options);

}  // namespace yoke::models
