// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/llama.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/models/words.h"
#include "yoke/parallel/attention.h"

namespace yoke::models {
namespace {

using namespace parallel;

Linear make_linear(int64_t in, int64_t out) {
  return Linear(torch::nn::LinearOptions(in, out).bias(false));
}

struct Start : torch::nn::Module {
  Start(const LlamaOptions& options, const TensorAxis& axis)
      : words(register_module("words", Embedding(options.vocab, options.dim))), axis(axis) {}
  at::Tensor forward(const at::Tensor& text) { return words(text); }
  void split() { words->split_words(axis); }
  Embedding words;
  const TensorAxis axis;
};

struct Block : torch::nn::Module {
  Block(const LlamaOptions& options, const TensorAxis& axis)
      : norm1(register_module("norm1", RmsNorm(options.dim, options.eps))),
        attention(
            register_module("attention", Attention(AttentionOptions{.dim = options.dim,
                                                                    .heads = options.heads,
                                                                    .kv_heads = options.kv_heads,
                                                                    .head_dim = options.head_dim,
                                                                    .bias = options.qkv_bias,
                                                                    .out_bias = false,
                                                                    .rotary = options.rotary}))),
        norm2(register_module("norm2", RmsNorm(options.dim, options.eps))),
        gate_up(register_module("gate_up", make_linear(options.dim, 2 * options.ffn))),
        down(register_module("down", make_linear(options.ffn, options.dim))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor mixed = x + attention(norm1(x));
    const auto parts = gate_up(norm2(mixed)).chunk(2, -1);
    return mixed + down(at::silu(parts[0]) * parts[1]);
  }
  void split() {
    attention->split_heads(axis);
    const int64_t ffn = gate_up->options.out_features() / 2;
    gate_up->split_outputs(axis, {ffn, ffn});
    down->split_inputs(axis);
  }
  RmsNorm norm1;
  Attention attention;
  RmsNorm norm2;
  Linear gate_up, down;
  const TensorAxis axis;
};

}  // namespace

int64_t usual_ffn(int64_t dim) { return (8 * dim / 3 + 63) / 64 * 64; }

Model make_llama(const LlamaOptions& given) {
  LlamaOptions options = given;
  auto& [layers, dim, heads, vocab, seq, kv_heads, head_dim, ffn, tied, qkv_bias, eps, rotary, seed,
         device, dtype, recompute, init] = options;
  if (kv_heads == 0) kv_heads = heads;
  if (ffn == 0) ffn = usual_ffn(dim);
  if (std::min({layers, dim, heads, vocab, seq, ffn, kv_heads}) < 1 || heads % kv_heads != 0 ||
      (head_dim == 0 && dim % heads != 0))
    fail(Kind::Config,
         "a llama wants layers, dim, heads, vocab, seq, ffn and kv_heads from 1 on, kv_heads that "
         "divide heads, and heads that divide dim; got ",
         layers, ", ", dim, ", ", heads, ", ", vocab, ", ", seq, ", ", ffn, ", ", kv_heads);
  if (head_dim == 0) head_dim = dim / heads;
  const int64_t outputs = (heads + 2 * kv_heads) * head_dim;
  const int64_t block = dim * outputs + heads * head_dim * dim + 3 * dim * ffn;
  Model model = words_model(layers, dim, vocab, seq, block, tied, device);
  model.num_parameters =
      (tied ? 1 : 2) * vocab * dim + dim + layers * (block + 2 * dim + (qkv_bias ? outputs : 0));
  model.cut = {
      {heads, "heads"}, {kv_heads, "heads of keys and values"}, {vocab, "words"}, {ffn, "of ffn"}};
  const auto scale = [](const std::string& key) {
    return is_norm(key) ? -1 : key.ends_with("bias") ? 0 : 0.02;
  };
  model.layers = layers_of<Start, Block, RmsNorm>(
      options, tied, scale, [dim = dim, eps = eps] { return RmsNorm(dim, eps); });
  return model;
}

}  // namespace yoke::models
