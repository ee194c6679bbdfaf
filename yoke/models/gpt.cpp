// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/gpt.h"

#include <ATen/Functions.h>

#include <cmath>

#include "yoke/base/error.h"
#include "yoke/models/block.h"
#include "yoke/models/words.h"
#include "yoke/parallel/passing.h"

namespace yoke::models {
namespace {

using namespace parallel;

struct Start : torch::nn::Module {
  Start(const GptOptions& options, const TensorAxis& axis)
      : words(register_module("words", Embedding(options.vocab, options.dim))),
        positions(register_parameter("positions", at::empty({options.seq, options.dim}))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& text) {  // [batch, tokens]
    const auto& [documents, target, past] = Passing::current();
    const int64_t tokens = text.size(1), before = past ? past->length() : 0;
    if (before + tokens > positions.size(0))
      fail(Kind::Usage, before + tokens, " tokens, and the model knows ", positions.size(0),
           " positions");
    const int64_t count = axis.scatters() ? axis.part_of(tokens, "tokens") : tokens;
    const int64_t first = axis.scatters() ? axis.rank() * count : before;
    if (!documents.defined()) return words(text) + positions.narrow(0, first, count);
    return words(text) + at::embedding(positions, places_in(documents).narrow(1, first, count));
  }
  void split() { words->split_words(axis); }
  Embedding words;
  at::Tensor positions;
  const TensorAxis axis;
};

struct GptBlock : Block {
  GptBlock(const GptOptions& options, const TensorAxis& axis)
      : Block({.dim = options.dim, .heads = options.heads, .ffn = options.ffn}, axis) {}
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
    return is_norm(key) ? -1 : key.ends_with("bias") ? 0 : residual ? less : 0.02;
  };
  model.layers = layers_of<Start, GptBlock, LayerNorm>(
      options, /*tied=*/true, scale, [dim = dim] { return Block::make_norm({.dim = dim}); });
  return model;
}

}  // namespace yoke::models
