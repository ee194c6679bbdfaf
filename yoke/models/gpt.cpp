// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/gpt.h"

#include <ATen/Functions.h>

#include <cmath>

#include "yoke/base/error.h"
#include "yoke/models/words.h"
#include "yoke/parallel/attention.h"

namespace yoke::models {
namespace {

using namespace parallel;

LayerNorm make_norm(int64_t dim) { return LayerNorm(torch::nn::LayerNormOptions({dim})); }

struct Start : torch::nn::Module {
  Start(const GptOptions& options, const TensorAxis& axis)
      : words(register_module("words", Embedding(options.vocab, options.dim))),
        positions(register_parameter("positions", at::empty({options.seq, options.dim}))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& text) {  // [batch, tokens]
    const int64_t tokens = text.size(1);
    if (tokens > positions.size(0))
      fail(Kind::Usage, tokens, " tokens, and the model knows ", positions.size(0), " positions");
    const int64_t count = axis.scatters() ? axis.part_of(tokens, "tokens") : tokens;
    return words(text) + positions.narrow(0, axis.scatters() ? axis.rank() * count : 0, count);
  }
  void split() { words->split_words(axis); }
  Embedding words;
  at::Tensor positions;
  const TensorAxis axis;
};

struct Block : torch::nn::Module {
  Block(const GptOptions& options, const TensorAxis& axis)
      : norm1(register_module("norm1", make_norm(options.dim))),
        attention(register_module(
            "attention", Attention(AttentionOptions{.dim = options.dim, .heads = options.heads}))),
        norm2(register_module("norm2", make_norm(options.dim))),
        up(register_module("up", Linear(options.dim, options.ffn))),
        down(register_module("down", Linear(options.ffn, options.dim))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto [whole, first] = norm1->sum(x);
    const auto [mixed, second] = norm2->sum(whole, attention(first));
    return mixed + down(at::gelu(up(second), "tanh"));
  }
  void split() {
    attention->split_heads(axis);
    up->split_outputs(axis);
    down->split_inputs(axis);
  }
  LayerNorm norm1;
  Attention attention;
  LayerNorm norm2;
  Linear up, down;
  const TensorAxis axis;
};

}  // namespace

Model make_gpt(const GptOptions& given) {
  GptOptions options = given;
  if (options.ffn == 0) options.ffn = 4 * options.dim;
  const auto& [layers, dim, heads, vocab, seq, ffn, seed, device, dtype, recompute, init] = options;
  if (std::min({layers, dim, heads, vocab, seq, ffn}) < 1 || dim % heads != 0)
    fail(Kind::Config,
         "a gpt wants layers, dim, heads, vocab, seq and ffn from 1 on, and heads that "
         "divide dim; got ",
         layers, ", ", dim, ", ", heads, ", ", vocab, ", ", seq, ", ", ffn);
  const int64_t block = 4 * dim * dim + 2 * dim * ffn;
  Model model = words_model(layers, dim, vocab, seq, block, /*tied=*/true, device);
  model.num_parameters = vocab * dim + seq * dim + 2 * dim + layers * (block + 9 * dim + ffn);
  model.cut = {{heads, "heads"}, {vocab, "words"}, {ffn, "of ffn"}};
  // GPT-2 draws with 0.02, and less for what is added to the residual stream.
  const double less = 0.02 / std::sqrt(2.0 * double(layers));
  const auto scale = [=](const std::string& key) {
    const bool residual = key == "attention.out.weight" || key == "down.weight";
    return key.ends_with("bias") ? 0 : residual ? less : 0.02;
  };
  model.layers = layers_of<Start, Block, LayerNorm>(options, /*tied=*/true, scale,
                                                    [dim = dim] { return make_norm(dim); });
  return model;
}

}  // namespace yoke::models
