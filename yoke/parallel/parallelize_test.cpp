// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/parallelize.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "yoke/parallel/layers.h"
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
  for (const std::string text :
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

TEST(Parallelize, TellsWhichRuleIsForNoLayer) {
  auto failure = [](const std::string& text) {
    return failure_of(
        2, [&](Communicator& world) { parallelize(*make_model(), plan::parse_plan(text), world); });
  };
  EXPECT_TRUE(has(failure("tp=2 split=17:outputs"), "split=17 matches no layer"));
  EXPECT_TRUE(has(failure("tp=2 split=2:outputs"), "'2', which is torch::nn::GELU"));
  EXPECT_TRUE(has(failure("tp=2 split=1:outputs:5,11"),
                  "5 outputs of a linear layer cannot be cut into 2 equal parts"));
  EXPECT_TRUE(has(failure("pp=3"), "3 x 1 x 1 = 3 ranks, and there are 2"));
}

}  // namespace yoke::parallel
