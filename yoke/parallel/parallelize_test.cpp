// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/parallelize.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "yoke/parallel/attention.h"
#include "yoke/parallel/ranks_test.h"

namespace yoke::parallel {
namespace {

// Only of torch's own modules.
torch::nn::Sequential make_model() {
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    model->push_back(torch::nn::Linear(8, 16));
    model->push_back(torch::nn::GELU());
    model->push_back(torch::nn::Linear(16, 8));
  }
  const at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    item.value().set_data(normal(item.key(), item.value().sizes(), 0.4).to(test_device()));
  return model;
}

struct Outcome {
  std::vector<double> losses = {}, norms = {};
};

Outcome train(const std::string& text, const std::function<void(Pipeline&)>& look = nullptr) {
  const auto plan = plan::parse_plan(text);
  Outcome outcome;
  on_ranks(plan.num_ranks(), [&](Communicator& world) {
    const auto pipeline = parallelize(*make_model(), plan, world);
    Sgd optimizer(pipeline->data(), {{.lr = 0.05, .clip = 1}, 0.9});
    const int dp_rank = pipeline->data().comm().rank();
    const int64_t count = 8 / plan.dp / plan.micro_batches;
    for (int step = 0; step < 3; ++step) {
      auto samples = [&](int micro) {
        return normal(cat("x", step), {8, 8}, 1)
            .narrow(0, (dp_rank * plan.micro_batches + micro) * count, count)
            .to(test_device());
      };
      const auto loss = pipeline->run(
          {.input = samples, .loss = [&](const at::Tensor& y, int m) {
             return Pipeline::Loss{(y - samples(m).sin()).square().sum(), double(count)};
           }});
      const double norm = optimizer.step().grad_norm();
      const at::Tensor sum = at::zeros({1}, at::device(test_device()).dtype(at::kDouble));
      if (loss.sum.defined()) sum.add_(loss.sum);
      world.all_reduce(sum).wait();
      if (world.rank() > 0) continue;
      outcome.losses.push_back(sum.item<double>() / plan.tp);
      outcome.norms.push_back(norm);
    }
    if (look) look(*pipeline);
  });
  return outcome;
}

}  // namespace

TEST(Parallelize, ASequentialByPatternsOfNames) {
  const auto one = train("");
  // Layers cut by their outputs are followed by layers cut by their inputs.
  const std::string ends = " split=1:outputs split=3:inputs split=13:outputs split=15:inputs";
  for (const std::string& text :
       {std::string("dp=2 zero=1"), std::string("pp=2 micro=2"),
        std::string("pp=2 micro=4 schedule=zbv layers=3,5,4,4"), "tp=2" + ends,
        "tp=2 sequence=yes" + ends, "pp=2 tp=2 micro=2 sequence=yes" + ends,
        "dp=2 tp=2 pp=2 micro=2 zero=1 schedule=zb-h1" + ends}) {
    SCOPED_TRACE(text);
    const auto outcome = train(text);
    for (size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(one.losses[i], outcome.losses[i], 1e-11 * one.losses[i]);
      EXPECT_NEAR(one.norms[i], outcome.norms[i], 1e-11 * one.norms[i]);
    }
  }
}

// Words go in, and their logits come out; the embedding is whole, or each rank has a part of it.
TEST(Parallelize, WordsThatAreCutOrNot) {
  auto run = [](const std::string& text) {
    const auto plan = plan::parse_plan(text);
    std::vector<double> norms;
    on_ranks(plan.num_ranks(), [&](Communicator& world) {
      torch::nn::Sequential model(
          torch::nn::Embedding(12, 8), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
          torch::nn::Linear(8, 16), torch::nn::GELU(), torch::nn::Linear(16, 12));
      {
        const at::NoGradGuard no_grad;
        for (auto& item : model->named_parameters())
          item.value().set_data(normal(item.key(), item.value().sizes(), 0.4).to(test_device()));
      }
      const auto pipeline = parallelize(*model, plan, world);
      Sgd optimizer(pipeline->data(), {{.lr = 0.05}, 0.9});
      for (int step = 0; step < 3; ++step) {
        const at::Tensor words =
            (at::arange(12, at::kLong) * 5 + step).remainder(12).view({2, 6}).to(test_device());
        pipeline->run({.input = [&](int) { return words; },
                       .loss =
                           [&](const at::Tensor& y, int) {
                             const at::Tensor sum = at::cross_entropy_loss(
                                 y.reshape({-1, 12}), words.roll(1, 1).reshape({-1}), {},
                                 at::Reduction::Sum);
                             return Pipeline::Loss{sum, 12.0};
                           }});
        const double norm = optimizer.step().grad_norm();
        if (world.rank() == 0) norms.push_back(norm);
      }
      pipeline->data().check_replicas();
    });
    return norms;
  };
  const auto one = run("");
  const std::string mlp = " split=2:outputs split=4:inputs";
  for (const std::string& text :
       {"tp=2" + mlp, "tp=2 split=0:words" + mlp, "tp=2 sequence=yes" + mlp,
        "tp=2 sequence=yes split=0:words" + mlp, "pp=2 tp=2 sequence=yes split=*:words" + mlp}) {
    const auto norms = run(text);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], norms[i], 1e-11) << text;
  }
}

// Attention with norms of queries and keys that every rank has, and uses on its own heads.
struct NormedAttention : torch::nn::Module {
  NormedAttention() {
    qkv = register_module("qkv", Linear(8, 24));
    norm = register_module("norm", LayerNorm(torch::nn::LayerNormOptions({2})));
    out = register_module("out", Linear(8, 8));
    attention = register_module("attention", Attention(AttentionOptions{.dim = 8, .heads = 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto all = qkv(x).chunk(3, -1);
    const auto heads = [](const at::Tensor& t) { return t.unflatten(-1, {-1, 2}).transpose(1, 2); };
    const at::Tensor mixed = at::scaled_dot_product_attention(
        norm(heads(all[0])), norm(heads(all[1])), heads(all[2]), {}, 0, /*is_causal=*/true);
    return x + attention(out(mixed.transpose(1, 2).flatten(2)));
  }
  Linear qkv = nullptr, out = nullptr;
  LayerNorm norm = nullptr;
  Attention attention = nullptr;
};

TEST(Parallelize, ParametersOfARanksOwnHeads) {
  auto run = [](const std::string& text) {
    const auto plan = plan::parse_plan(text);
    std::vector<double> norms;
    on_ranks(plan.num_ranks(), [&](Communicator& world) {
      const LayerFactory factory = [] {
        const auto module = std::make_shared<NormedAttention>();
        const at::NoGradGuard no_grad;
        for (auto& item : module->named_parameters())
          item.value().set_data(normal(item.key(), item.value().sizes(), 0.3).to(test_device()));
        return layer(module);
      };
      const auto pipeline = parallelize({factory, factory}, plan, world);
      Sgd optimizer(pipeline->data(), {{.lr = 0.05, .clip = 1}, 0.9});
      for (int step = 0; step < 3; ++step) {
        pipeline->run({.input =
                           [&](int) {
                             return normal(cat(step), {2, 6, 8}, 1).to(test_device());
                           },
                       .loss =
                           [&](const at::Tensor& y, int) {
                             return Pipeline::Loss{y.tanh().sum(), 2.0};
                           }});
        const double norm = optimizer.step().grad_norm();
        if (world.rank() == 0) norms.push_back(norm);
      }
      pipeline->data().check_replicas();
    });
    return norms;
  };
  const auto one = run("");
  // A rule for heads cuts the linear layers of an attention too: the others are left to the rest.
  const std::string cut =
      "split=*:heads split=*qkv:outputs:8,8,8 split=*out:inputs partial=*.norm.*";
  for (const std::string& text : {"tp=2 " + cut, "pp=2 tp=2 " + cut}) {
    const auto norms = run(text);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], norms[i], 1e-10 * one[i]) << text;
  }
  auto failure = [&](const std::string& text) {
    try {
      run("tp=2 " + text);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_TRUE(has(failure(cut + " split=*:outputs"), "split=* matches no layer"));  // none is left
  EXPECT_TRUE(has(failure(cut.substr(0, cut.find(" partial"))), "another '0.norm.weight'"));
}

TEST(Parallelize, TellsWhichRuleIsForNoLayer) {
  auto failure = [](const std::string& text) {
    return failure_of(
        2, [&](Communicator& world) { parallelize(*make_model(), plan::parse_plan(text), world); });
  };
  EXPECT_TRUE(has(failure("tp=2 split=17:outputs"), "split=17 matches no layer"));
  EXPECT_TRUE(has(failure("tp=2 split=2:outputs"), "'2', which is torch::nn::GELU"));
  EXPECT_TRUE(has(failure("tp=2 split=1:outputs:5,11"),
                  "5 outputs of a linear layer cannot be cut into 2 equal parts"));
  EXPECT_TRUE(has(failure("tp=2"), "which layers to cut"));
  EXPECT_TRUE(has(failure("pp=3"), "3 x 1 x 1 = 3 ranks, and there are 2"));
}

}  // namespace yoke::parallel
