// SPDX-License-Identifier: Apache-2.0
// Small models for the tests, with weights and data that do not depend on who makes them.
#pragma once

#include <ATen/Context.h>
#include <torch/nn.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"

namespace yoke::parallel {

inline at::Tensor normal(const std::string& name, at::IntArrayRef sizes, double scale,
                         uint64_t first = 0) {
  const Rng rng(7, name);
  at::Tensor values = at::empty(sizes, at::kDouble);
  auto* data = values.mutable_data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i) data[i] = scale * rng.normal(first + uint64_t(i));
  return values;
}

// Where the models of the tests live: YOKE_TEST_DEVICE=cuda, else on the CPU.
inline at::Device test_device() {
  const char* name = std::getenv("YOKE_TEST_DEVICE");
  return name ? at::Device(name) : at::kCPU;
}

// A model with its loss: the sum over the samples [begin, end) of a step's batch, which every plan
// cuts as it likes.
struct TestModel : torch::nn::Module {
  virtual at::Tensor loss_sum(int64_t step, int64_t begin, int64_t end) = 0;
  at::ScalarType type = at::kDouble;  // of the inputs

  void make(at::ScalarType dtype) {
    const at::NoGradGuard no_grad;
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
    type = dtype;
    for (auto& item : named_parameters()) {
      item.value().copy_(normal(item.key(), item.value().sizes(), 0.2));
      item.value().set_data(item.value().to(test_device(), dtype));
    }
  }
  at::Tensor input(int64_t step, int64_t begin, int64_t end, std::vector<int64_t> shape) const {
    int64_t each = 1;
    for (const int64_t size : shape) each *= size;
    shape.insert(shape.begin(), end - begin);
    return normal(cat("input ", step), shape, 1, uint64_t(begin * each)).to(test_device(), type);
  }
};

struct Mlp : TestModel {
  Mlp() {
    for (int i = 0; i < 4; ++i)
      layers->push_back(torch::nn::Linear(i == 0 ? 7 : 19, i == 3 ? 3 : 19));
    register_module("layers", layers);
  }
  at::Tensor loss_sum(int64_t step, int64_t begin, int64_t end) override {
    at::Tensor x = input(step, begin, end, {7});
    const at::Tensor y = x.narrow(1, 0, 3).sin();
    for (size_t i = 0; i < layers->size(); ++i) {
      x = layers[i]->as<torch::nn::Linear>()->forward(x);
      if (i + 1 < layers->size()) x = at::tanh(x);
      if (i == 1 && in_the_middle) in_the_middle(x);
    }
    return (x - y).square().sum();
  }
  std::function<void(const at::Tensor&)> in_the_middle;  // of forward
  torch::nn::ModuleList layers;
};

struct Cnn : TestModel {
  Cnn()
      : first(register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 5, 3)))),
        second(register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 6, 3)))),
        head(register_module("head", torch::nn::Linear(6 * 16, 4))) {}
  at::Tensor loss_sum(int64_t step, int64_t begin, int64_t end) override {
    const at::Tensor x = input(step, begin, end, {2, 8, 8});
    at::Tensor h = at::relu(second(at::relu(first(x))));
    return (head(h.flatten(1)) - x.flatten(1).narrow(1, 0, 4)).square().sum();
  }
  torch::nn::Conv2d first, second;
  torch::nn::Linear head;
};

// Two blocks with attention; the head is the embedding.
struct Gpt : TestModel {
  static constexpr int64_t kVocabulary = 23, kDim = 16, kTime = 6, kHeads = 2;
  struct Block : torch::nn::Module {
    Block()
        : norm1(
              register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))),
          norm2(
              register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))),
          qkv(register_module("qkv", torch::nn::Linear(kDim, 3 * kDim))),
          out(register_module("out", torch::nn::Linear(kDim, kDim))),
          up(register_module("up", torch::nn::Linear(kDim, 4 * kDim))),
          down(register_module("down", torch::nn::Linear(4 * kDim, kDim))) {}
    at::Tensor forward(at::Tensor x) {
      const int64_t b = x.size(0);
      const auto parts = qkv(norm1(x)).view({b, kTime, 3, kHeads, kDim / kHeads}).unbind(2);
      const at::Tensor attended = at::scaled_dot_product_attention(
          parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), {}, 0,
          /*is_causal=*/true);
      x = x + out(attended.transpose(1, 2).reshape({b, kTime, kDim}));
      return x + down(at::gelu(up(norm2(x))));
    }
    torch::nn::LayerNorm norm1, norm2;
    torch::nn::Linear qkv, out, up, down;
  };
  Gpt()
      : embedding(register_module("embedding", torch::nn::Embedding(kVocabulary, kDim))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))) {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module(cat("block", i), std::make_shared<Block>()));
  }
  at::Tensor loss_sum(int64_t step, int64_t begin, int64_t end) override {
    const Rng rng(11, "tokens", uint64_t(step));
    at::Tensor tokens = at::empty({end - begin, kTime + 1}, at::kLong);
    for (int64_t i = 0; i < tokens.numel(); ++i)
      tokens.mutable_data_ptr<int64_t>()[i] =
          int64_t(rng.below(uint64_t(begin * (kTime + 1) + i), kVocabulary));
    tokens = tokens.to(test_device());
    at::Tensor x = embedding(tokens.narrow(1, 0, kTime));
    for (const auto& block : blocks) x = block->forward(x);
    const at::Tensor head = untie ? embedding->weight.detach() : embedding->weight;
    const at::Tensor logits = at::linear(norm(x), head);
    return at::cross_entropy_loss(logits.view({-1, kVocabulary}),
                                  tokens.narrow(1, 1, kTime).reshape({-1}), {}, at::Reduction::Sum);
  }
  bool untie = false;  // a mistake: the head's gradient is lost
  torch::nn::Embedding embedding;
  torch::nn::LayerNorm norm;
  std::vector<std::shared_ptr<Block>> blocks;
};

// Layers that some samples use, that some steps use, that nobody uses, and one that is frozen.
struct Branches : TestModel {
  Branches()
      : always(register_module("always", torch::nn::Linear(5, 8))),
        late(register_module("late", torch::nn::Linear(8, 8))),
        sometimes(register_module("sometimes", torch::nn::Linear(8, 8))),
        never(register_module("never", torch::nn::Linear(8, 8))),
        frozen(register_module("frozen", torch::nn::Linear(8, 8))) {}
  at::Tensor loss_sum(int64_t step, int64_t begin, int64_t end) override {
    const at::Tensor x = input(step, begin, end, {5});
    at::Tensor h = at::tanh(always(x));
    if (end > 6) {  // of the samples from 6 on
      const int64_t first = std::max<int64_t>(0, 6 - begin);
      const at::Tensor rest = h.narrow(0, first, h.size(0) - first);
      h = at::cat({h.narrow(0, 0, first), at::tanh(late(rest))});
    }
    if (step % 2 == 1) h = at::tanh(sometimes(h));
    return (at::tanh(frozen(h)).sum(1) - x.sum(1)).square().sum();
  }
  torch::nn::Linear always, late, sometimes, never, frozen;
};

inline std::shared_ptr<TestModel> make_model(const std::string& name, at::ScalarType dtype) {
  std::shared_ptr<TestModel> model;
  if (name == "mlp") model = std::make_shared<Mlp>();
  if (name == "cnn") model = std::make_shared<Cnn>();
  if (name == "gpt") model = std::make_shared<Gpt>();
  if (name == "branches") model = std::make_shared<Branches>();
  model->make(dtype);
  if (auto* branches = dynamic_cast<Branches*>(model.get()))
    for (auto& parameter : branches->frozen->parameters()) parameter.set_requires_grad(false);
  return model;
}

}  // namespace yoke::parallel
