// SPDX-License-Identifier: Apache-2.0
// Self-attention whose heads can be shared out over the ranks of an axis. Several queries may share
// a key and a value (Ainslie et al., 2023).
#pragma once

#include "yoke/parallel/layers.h"
#include "yoke/parallel/rotary.h"

namespace yoke::parallel {

struct AttentionOptions {
  int64_t dim = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: dim / heads
  bool bias = true;      // of queries, keys and values
  bool out_bias = true;  // of the result
  bool causal = true;
  RotaryOptions rotary = {};
};

class AttentionImpl : public torch::nn::Module {
 public:
  // Throws Kind::Usage with the numbers where heads do not divide.
  explicit AttentionImpl(AttentionOptions options);
  at::Tensor forward(const at::Tensor& input);  // [batch, tokens, dim]
  // Every rank gets its part of the heads.
  void split_heads(const TensorAxis& axis);

  Linear qkv = nullptr, out = nullptr;

 private:
  AttentionOptions options_;
  Rotary rotary_;
};
TORCH_MODULE(Attention);

}  // namespace yoke::parallel
