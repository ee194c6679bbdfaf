// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/placement.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <atomic>

#include "yoke/parallel/layers.h"
#include "yoke/parallel/ranks_test.h"

namespace yoke::parallel {
namespace {

Placed linear(const std::string& name, int64_t in, int64_t out) {
  const auto module = std::make_shared<LinearImpl>(in, out);
  const at::NoGradGuard no_grad;
  for (auto& item : module->named_parameters())
    item.value().set_data(normal(name + item.key(), item.value().sizes(), 0.4));
  return {{module, [module](const at::Tensor& x) { return at::tanh(module->forward(x)); }},
          test_device()};
}

at::Tensor sum_of(const std::vector<at::Tensor>& results) { return at::stack(results).sum(0); }

std::vector<Placed> make_parts() {
  const std::vector<Placed> branches{linear("a", 6, 6), linear("b", 6, 6), linear("c", 6, 6)};
  return {linear("first", 4, 6),
          {side_by_side(branches, sum_of), test_device()},
          linear("last", 6, 2),
          linear("end", 2, 2)};
}

at::Tensor sample(int64_t rows) { return normal("x", {rows, 4}, 1).to(test_device()); }

}  // namespace

TEST(Placement, BranchesAndSeriesAreAnOrdinaryModel) {
  const auto parts = make_parts();
  const Layer model = in_series(parts);
  EXPECT_EQ(model.module->parameters().size(), 12u);
  const at::Tensor x = sample(5).requires_grad_(true);
  const at::Tensor y = model.forward(x);
  y.square().sum().backward();
  const at::Tensor dx = x.grad().clone();
  std::vector<at::Tensor> gradients;
  for (auto& parameter : model.module->parameters()) {
    ASSERT_TRUE(parameter.grad().defined());
    gradients.push_back(parameter.grad().clone());
    parameter.mutable_grad().reset();
  }
  // The same by hand.
  x.mutable_grad().reset();
  const at::Tensor h = parts[0].layer.forward(x);
  std::vector<at::Tensor> results;
  for (const std::string name : {"a", "b", "c"}) {
    const auto p = model.module->named_parameters();
    const std::string place = cat("1.", name[0] - 'a', ".");
    results.push_back(at::tanh(at::linear(h, p[place + "weight"], p[place + "bias"])));
  }
  const at::Tensor again = parts[3].layer.forward(parts[2].layer.forward(sum_of(results)));
  EXPECT_TRUE(at::equal(y, again));
  again.square().sum().backward();
  EXPECT_LT((x.grad() - dx).abs().max().item<double>(), 1e-14);
  for (size_t i = 0; i < gradients.size(); ++i)
    EXPECT_LT((gradients[i] - model.module->parameters()[i].grad()).abs().max().item<double>(),
              1e-14);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model.forward(x), y));
}

TEST(Placement, BranchesRunAtTheSameTime) {
  std::atomic<int> inside{0};
  std::atomic<bool> met{true};
  auto meets = [&](const at::Tensor& x) {  // goes on when all three are in it
    ++inside;
    const Time end = SteadyClock().now() + std::chrono::seconds(20);
    while (inside < 3 && SteadyClock().now() < end) std::this_thread::yield();
    if (inside < 3) met = false;
    return x * 2;
  };
  const Layer model =
      side_by_side({{{nullptr, meets}}, {{nullptr, meets}}, {{nullptr, meets}}}, sum_of);
  EXPECT_EQ(model.forward(at::ones({2})).sum().item<double>(), 12);
  EXPECT_TRUE(met);
  EXPECT_THROW(
      side_by_side(
          {{{nullptr,
             [](const at::Tensor&) -> at::Tensor { fail(Kind::Usage, "a branch fails"); }}}},
          sum_of)
          .forward(at::ones({2})),
      Error);
}

TEST(Placement, IsAPipelineByAnotherWord) {
  std::vector<std::vector<at::Tensor>> outcomes;
  for (const std::string schedule : {"layer", "gpipe", "1f1b", "zb-h1", "interleaved", "zbv"}) {
    const auto parts = make_parts();
    const int micro = schedule == "layer" ? 1 : 4;
    run_pipeline(parts, schedule, micro, [&](Pipeline& pipeline) {
      Sgd optimizer(pipeline.data(), {{.lr = 0.1}, 0.9});
      for (int step = 0; step < 3; ++step) {
        pipeline.run({.input = [&](int m) { return sample(8).narrow(0, m * 8 / micro, 8 / micro); },
                      .loss =
                          [&](const at::Tensor& y, int) {
                            return Pipeline::Loss{y.square().sum(), double(8 / micro)};
                          }});
        optimizer.step();
      }
    });
    outcomes.push_back(in_series(parts).module->parameters());
    for (size_t i = 0; i < outcomes[0].size(); ++i)
      EXPECT_LT((outcomes[0][i] - outcomes.back()[i]).abs().max().item<double>(), 1e-12)
          << schedule;
  }
  // A rank without parameters.
  const std::vector<Placed> parts{linear("first", 4, 2),
                                  {{nullptr, [](auto& x) { return x * 3; }}, test_device()}};
  const at::Tensor before = parts[0].layer.module->parameters()[0].clone();
  run_pipeline(parts, "1f1b", 2, [&](Pipeline& pipeline) {
    AdamW optimizer(pipeline.data(), {{.lr = 0.1}});
    pipeline.run({.input = [&](int m) { return sample(2).narrow(0, m, 1); },
                  .loss =
                      [](const at::Tensor& y, int) {
                        return Pipeline::Loss{y.sum(), 1};
                      }});
    optimizer.step();
  });
  EXPECT_FALSE(at::equal(parts[0].layer.module->parameters()[0], before.to(test_device())));
  EXPECT_THROW(run_pipeline({linear("one", 4, 4)}, "zbv", 2, [](Pipeline&) {}), Error);
}

}  // namespace yoke::parallel
