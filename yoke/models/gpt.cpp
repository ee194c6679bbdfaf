// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/gpt.h"

#include <ATen/Functions.h>

#include <cmath>

#include "yoke/base/error.h"
#include "yoke/parallel/attention.h"
#include "yoke/parallel/cross_entropy.h"
#include "yoke/parallel/kernels.h"

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
        axis(axis),
        recompute(options.recompute) {}
  at::Tensor forward(const at::Tensor& x) {
    return checkpoint(
        recompute, place,
        [this](const at::Tensor& input) {
          const auto [whole, first] = norm1->sum(input);
          const auto [mixed, second] = norm2->sum(whole, attention(first));
          return mixed + down(at::gelu(up(second), "tanh"));
        },
        x);
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
  const Checkpointing recompute;
  int64_t place = 0;
};

struct End : torch::nn::Module {
  End(const GptOptions& options, const TensorAxis& axis)
      : norm(register_module("norm", make_norm(options.dim))),
        head(register_module(
            "head", Linear(torch::nn::LinearOptions(options.dim, options.vocab).bias(false)))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }
  void split() { head->split_outputs(axis); }
  LayerNorm norm;
  Linear head;
  const TensorAxis axis;
};

const std::string kWords = "0.words.weight";

// GPT-2 draws with 0.02, and less for what is added to the residual stream.
template <typename Module>
Layer made(const GptOptions& options, const TensorAxis& axis, int64_t place,
           const std::string& head) {
  const auto module = std::make_shared<Module>(options, axis);
  for (auto& item : module->named_parameters()) {
    const std::string& key = item.key();
    if (key.find("norm") != std::string::npos) continue;
    const std::string name = cat(place, ".", key);
    const bool residual = key == "attention.out.weight" || key == "down.weight";
    draw(item.value(), options.seed, name == head ? kWords : name,
         key.ends_with("bias") ? 0
         : residual            ? 0.02 / std::sqrt(2.0 * double(options.layers))
                               : 0.02);
  }
  if constexpr (std::is_same_v<Module, Block>) module->place = place;
  module->to(options.device, options.dtype);
  module->split();
  return layer(module);
}

}  // namespace

Model make_gpt(const GptOptions& given) {
  GptOptions options = given;
  if (options.ffn == 0) options.ffn = 4 * options.dim;
  const auto& [layers, dim, heads, vocab, seq, ffn, seed, device, dtype, recompute] = options;
  if (std::min({layers, dim, heads, vocab, seq, ffn}) < 1 || dim % heads != 0)
    fail(Kind::Config,
         "a gpt wants layers, dim, heads, vocab, seq and ffn from 1 on, and heads that "
         "divide dim; got ",
         layers, ", ", dim, ", ", heads, ", ", vocab, ", ", seq, ", ", ffn);
  const std::string head = cat(layers + 1, ".head.weight");
  Model model{.ties = {{kWords, head}}, .tokens = seq, .can_scatter = true, .device = device};
  const int64_t block = 4 * dim * dim + 2 * dim * ffn;  // weights of its matrices
  model.num_parameters = vocab * dim + seq * dim + 2 * dim + layers * (block + 9 * dim + ffn);
  // 2 for each weight forward, 4 backward; attention's two products over half of the tokens.
  model.flops = 6.0 * double(layers * block + vocab * dim) + 6.0 * double(layers * seq * dim);
  model.costs.assign(size_t(layers) + 2, double(block + seq * dim));
  model.costs.front() = double(dim);
  model.costs.back() = double(vocab * dim);
  model.cut = {{heads, "heads"}, {vocab, "words"}, {ffn, "of ffn"}};
  model.layers = [options, head](const TensorAxis& axis) {
    load_kernels(options.device, options.dim);
    std::vector<LayerFactory> factories;
    for (int64_t place = 0; place < options.layers + 2; ++place)
      factories.push_back([=] {
        return place == 0                    ? made<Start>(options, axis, place, head)
               : place == options.layers + 1 ? made<End>(options, axis, place, head)
                                             : made<Block>(options, axis, place, head);
      });
    return factories;
  };
  model.loss_sum = [](const at::Tensor& logits, const at::Tensor& target, const TensorAxis& axis) {
    const at::Tensor rows = logits.reshape({-1, logits.size(-1)}), words = target.reshape({-1});
    return cross_entropy_sum(rows, words, axis);
  };
  return model;
}

}  // namespace yoke::models
