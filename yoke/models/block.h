// SPDX-License-Identifier: Apache-2.0
// A block as GPT-2 and ViT have it: attention and a GELU layer with norms before them.
#pragma once

#include <ATen/Functions.h>

#include "yoke/parallel/attention.h"
#include "yoke/parallel/layers.h"

namespace yoke::models {

struct BlockOptions {
  int64_t dim = 0, heads = 0, ffn = 0;
  double eps = 1e-5;
  bool causal = true;
  const char* gelu = "tanh";  // or none: not approximated
};

struct Block : torch::nn::Module {
  Block(const BlockOptions& options, const parallel::TensorAxis& axis)
      : norm1(register_module("norm1", make_norm(options))),
        attention(register_module(
            "attention",
            parallel::Attention(parallel::AttentionOptions{
                .dim = options.dim, .heads = options.heads, .causal = options.causal}))),
        norm2(register_module("norm2", make_norm(options))),
        up(register_module("up", parallel::Linear(options.dim, options.ffn))),
        down(register_module("down", parallel::Linear(options.ffn, options.dim))),
        gelu(options.gelu),
        axis(axis) {}
  static parallel::LayerNorm make_norm(const BlockOptions& options) {
    return parallel::LayerNorm(torch::nn::LayerNormOptions({options.dim}).eps(options.eps));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto [whole, first] = norm1->sum(x);
    const auto [mixed, second] = norm2->sum(whole, attention(first));
    return mixed + down(at::gelu(up(second), gelu));
  }
  void split() {
    attention->split_heads(axis);
    up->split_outputs(axis);
    down->split_inputs(axis);
  }
  parallel::LayerNorm norm1;
  parallel::Attention attention;
  parallel::LayerNorm norm2;
  parallel::Linear up, down;
  const char* const gelu;
  const parallel::TensorAxis axis;
};

}  // namespace yoke::models
