// SPDX-License-Identifier: Apache-2.0
// A small model in layers, trained on one rank and by a pipeline, for the tests of pipelines.
#pragma once

#include <gtest/gtest.h>

#include <map>

#include "yoke/parallel/layers.h"
#include "yoke/parallel/pipeline.h"
#include "yoke/parallel/ranks_test.h"
#include "yoke/plan/generate.h"

namespace yoke::parallel {

constexpr int64_t kWords = 13, kDim = 12, kTime = 5;
constexpr int kLayers = 17;  // an embedding, blocks, a head
inline const std::string kEmbedding = "0.weight", kHead = "16.weight";

// Half of the blocks can put off their weight gradients, the others cannot.
struct Block : torch::nn::Module {
  explicit Block(bool splits) : splits(splits) {
    const auto norm_options = torch::nn::LayerNormOptions({kDim});
    if (splits) {
      norm = register_module("norm", LayerNorm(norm_options));
      up = register_module("up", Linear(kDim, 2 * kDim));
      down = register_module("down", Linear(2 * kDim, kDim));
    } else {
      plain_norm = register_module("norm", torch::nn::LayerNorm(norm_options));
      plain_up = register_module("up", torch::nn::Linear(kDim, 2 * kDim));
      plain_down = register_module("down", torch::nn::Linear(2 * kDim, kDim));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor mixed = x + x.roll(1, 1);  // in place of attention
    return splits ? x + down(at::gelu(up(norm(mixed))))
                  : x + plain_down(at::gelu(plain_up(plain_norm(mixed))));
  }
  bool splits;
  LayerNorm norm = nullptr;
  Linear up = nullptr, down = nullptr;
  torch::nn::LayerNorm plain_norm = nullptr;
  torch::nn::Linear plain_up = nullptr, plain_down = nullptr;
};

inline Layer made(Layer layer, int place, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (auto& item : layer.module->named_parameters()) {
    item.value().copy_(normal(cat(place, ".", item.key()), item.value().sizes(), 0.3));
    item.value().set_data(item.value().to(test_device(), dtype));
  }
  return layer;
}

inline std::vector<LayerFactory> make_layers(at::ScalarType dtype = at::kDouble) {
  std::vector<LayerFactory> layers;
  for (int place = 0; place < kLayers; ++place)
    layers.push_back([=] {
      if (place == 0) return made(layer(Embedding(kWords, kDim)), place, dtype);
      if (place == kLayers - 1)
        return made(layer(Linear(torch::nn::LinearOptions(kDim, kWords).bias(false))), place,
                    dtype);
      return made(layer(std::make_shared<Block>(place % 2 == 1)), place, dtype);
    });
  return layers;
}

// Samples of one step; every plan cuts them as it likes.
inline at::Tensor tokens(int step, int64_t begin, int64_t end) {
  const Rng rng(3, "tokens", uint64_t(step));
  at::Tensor result = at::empty({end - begin, kTime + 1}, at::kLong);
  for (int64_t i = 0; i < result.numel(); ++i)
    result.mutable_data_ptr<int64_t>()[i] =
        int64_t(rng.below(uint64_t(begin * (kTime + 1) + i), kWords));
  return result.to(test_device());
}

inline at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& text) {
  return at::cross_entropy_loss(logits.reshape({-1, kWords}),
                                text.narrow(1, 1, kTime).reshape({-1}), {}, at::Reduction::Sum);
}

struct Trial {
  std::string schedule = "1f1b";
  int pp = 2, dp = 1, micro = 4, chunks = 2;
  int zero = 0;
  std::string optimizer = "sgd";
  PipelineOptions options = {};
  plan::Schedule custom = {};
};

constexpr int kSteps = 3;
constexpr int64_t kSamples = 16;  // of a step

struct Outcome {
  std::vector<double> losses = {}, norms = {};
  std::map<std::string, at::Tensor> parameters = {};
};

inline std::unique_ptr<Optimizer> make_optimizer(const std::string& name, DataParallel& dp) {
  if (name == "adamw") return std::make_unique<AdamW>(dp, AdamWOptions{{.lr = 0.01, .clip = 1}});
  return std::make_unique<Sgd>(dp, SgdOptions{{.lr = 0.05, .clip = 0.5}, 0.9});
}

// The whole model on one rank, without any of it.
inline Outcome alone(const std::string& optimizer_name, bool tied = false) {
  Outcome outcome;
  on_ranks(1, [&](Communicator& comm) {
    torch::nn::Module module;
    std::vector<Layer> layers;
    for (int place = 0; place < kLayers; ++place) {
      layers.push_back(make_layers()[size_t(place)]());
      module.register_module(std::to_string(place), layers.back().module);
    }
    if (tied) module.named_parameters()[kHead].set_data(module.named_parameters()[kEmbedding]);
    DataParallel dp(module, comm);
    const auto optimizer = make_optimizer(optimizer_name, dp);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor text = tokens(step, 0, kSamples);
      at::Tensor x = text.narrow(1, 0, kTime);
      for (const auto& layer : layers) x = layer.forward(x);
      const at::Tensor loss = loss_of(x, text);
      dp.backward(loss, double(kSamples * kTime));
      outcome.losses.push_back(loss.item<double>() / double(kSamples * kTime));
      outcome.norms.push_back(optimizer->step().grad_norm());
    }
    for (const auto& item : module.named_parameters())
      outcome.parameters[item.key()] = item.value().detach().clone();
  });
  return outcome;
}

inline Outcome together(const Trial& run) {
  Outcome outcome;
  Mutex mutex;
  on_ranks(run.pp * run.dp, [&](Communicator& world) {
    const MeshGroups mesh(world, {.pp = run.pp, .dp = run.dp});
    PipelineOptions options = run.options;
    options.data.zero = run.zero;
    const auto schedule =
        run.custom.rows.empty()
            ? plan::make_schedule(
                  run.schedule, {.ranks = run.pp, .micro_batches = run.micro, .chunks = run.chunks})
            : run.custom;
    Pipeline pipeline(make_layers(), schedule, mesh, options);
    const auto optimizer = make_optimizer(run.optimizer, pipeline.data());
    const int64_t cells = int64_t(run.micro) * run.dp;
    for (int step = 0; step < kSteps; ++step) {
      auto text = [&](int micro) {  // uneven where the numbers do not divide
        const int64_t place = mesh.dp.rank() * run.micro + micro;
        return tokens(step, kSamples * place / cells, kSamples * (place + 1) / cells);
      };
      const auto loss = pipeline.run(
          {.input = [&](int micro) { return text(micro).narrow(1, 0, kTime); },
           .loss =
               [&](const at::Tensor& output, int micro) {
                 const at::Tensor target = text(micro);
                 return Pipeline::Loss{loss_of(output, target), double(target.size(0) * kTime)};
               }});
      const double norm = optimizer->step().grad_norm();
      const at::Tensor sum = loss.sum.defined()
                                 ? loss.sum.to(at::kDouble).reshape({1})
                                 : at::zeros({1}, at::device(test_device()).dtype(at::kDouble));
      world.all_reduce(sum).wait();
      if (world.rank() > 0) continue;
      outcome.losses.push_back(sum.item<double>() / double(kSamples * kTime));
      outcome.norms.push_back(norm);
    }
    pipeline.data().gathered([&] {
      MutexLock lock(mutex);
      for (const auto& part : pipeline.data().units())
        for (const auto& item : part->named_parameters())
          outcome.parameters[item.key()] = item.value().detach().clone();
    });
  });
  return outcome;
}

inline void expect_equal(const Outcome& truth, const Outcome& outcome, const std::string& what,
                         double tolerance = 1e-11) {
  SCOPED_TRACE(what);
  ASSERT_EQ(truth.losses.size(), outcome.losses.size());
  for (size_t i = 0; i < truth.losses.size(); ++i) {
    EXPECT_NEAR(truth.losses[i], outcome.losses[i], tolerance * truth.losses[i]);
    EXPECT_NEAR(truth.norms[i], outcome.norms[i], tolerance * truth.norms[i]);
  }
  ASSERT_EQ(truth.parameters.size(), outcome.parameters.size());
  for (const auto& [name, value] : truth.parameters)
    EXPECT_LT((value - outcome.parameters.at(name)).abs().max().item<double>(), tolerance) << name;
}

}  // namespace yoke::parallel
