// SPDX-License-Identifier: Apache-2.0
// Data parallelism in fewer bits, when something fails, and how much memory it takes.
#include <cmath>
#include <limits>

#include "yoke/parallel/ranks_test.h"

namespace yoke::parallel {
namespace {

TEST(DataParallelPrecision, Bf16KeepsMastersInFloat32) {
  const auto exact = losses_of(1, "gpt", at::kFloat, {}, 8);
  for (int zero = 0; zero <= 3; ++zero) {
    const auto rough = losses_of(2, "gpt", at::kFloat,
                                 {.zero = zero,
                                  .precision = Precision::Bf16,
                                  .bucket_bytes = 8000,
                                  .first_bucket_bytes = 900},
                                 8);
    for (size_t i = 0; i < exact.size(); ++i)
      EXPECT_NEAR(rough[i], exact[i], 0.02 * exact[i]) << zero << ", step " << i;
  }
  // Updates far below the resolution of bfloat16 add up.
  on_ranks(2, [](Communicator& comm) {
    torch::nn::Linear model(64, 1);
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.fill_(1);
    }
    DataParallel dp(*model, comm, {.zero = 1, .precision = Precision::Bf16});
    Sgd optimizer(dp, {{.lr = 1e-3}});
    for (int step = 0; step < 100; ++step) {
      dp.backward(model(at::ones({1, 64})).sum(), 1);
      optimizer.step();
    }
    EXPECT_EQ(model->weight.scalar_type(), at::kBFloat16);
    EXPECT_NEAR(model->weight[0][5].item<float>(), 0.9, 0.005);
  });
}

TEST(DataParallelPrecision, Fp16LowersItsScaleTogether) {
  on_ranks(2, [](Communicator& comm) {
    const auto model = make_model("mlp", at::kFloat);
    DataParallel dp(*model, comm, {.precision = Precision::Fp16, .loss_scale = 1e7});
    AdamW optimizer(dp, {{.lr = 0.01}});
    int num_skipped = 0;
    double first = 0, last = 0;
    for (int step = 0; step < 40; ++step) {
      const at::Tensor loss = model->loss_sum(0, 6 * comm.rank(), 6 * comm.rank() + 6);
      dp.backward(loss, 6);
      num_skipped += optimizer.step().skipped;
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_GT(num_skipped, 0);
    EXPECT_LT(num_skipped, 20);
    EXPECT_DOUBLE_EQ(dp.loss_scale(), 1e7 / std::pow(2, num_skipped));
    EXPECT_LT(last, first / 2);
  });
}

TEST(DataParallelWire, SendsHalfTheBitsForSmallErrors) {
  const auto exact = losses_of(2, "gpt", at::kFloat, {});
  for (const auto& wire : {bf16_wire(), fp16_wire()})
    for (int zero = 0; zero <= 3; ++zero) {
      const auto rough = losses_of(2, "gpt", at::kFloat, {.zero = zero, .wire = wire});
      EXPECT_NE(rough, exact);
      for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(rough[i], exact[i], 3e-3 * exact[i]);
    }
}

// The largest gradient is the same on all ranks: their sum must fit into float16.
TEST(DataParallelWire, DoesNotOverflow) {
  for (const int ranks : {2, 3, 5, 7})
    on_ranks(ranks, [](Communicator& comm) {
      torch::nn::Linear model(4, 4);
      DataParallel dp(*model, comm, {.wire = fp16_wire()});
      Sgd optimizer(dp);
      dp.backward(model(at::ones({1, 4})).sum(), 1);
      EXPECT_NEAR(optimizer.step().grad_norm, std::sqrt(20), 0.01);
    });
}

TEST(DataParallelFailure, EndsEveryRankWithTheFirstCause) {
  // In forward, in a hook of the backward pass, and in the optimizer.
  for (int zero = 0; zero <= 3; ++zero)
    for (const std::string where : {"forward", "backward", "step"}) {
      const auto text = failure_of(3, [&](Communicator& comm) {
        const auto model = make_model("gpt", at::kFloat);
        DataParallel dp(*model, comm,
                        {.zero = zero, .bucket_bytes = 8000, .first_bucket_bytes = 900});
        AdamW optimizer(dp);
        train(comm, *model, dp, optimizer, 2);
        const bool mine = comm.rank() == 1;
        if (mine && where == "forward") throw std::runtime_error("out of cheese");
        at::Tensor loss = model->loss_sum(0, 4 * comm.rank(), 4 * comm.rank() + 4);
        if (mine && where == "backward")
          loss.register_hook([](const at::Tensor&) { throw std::runtime_error("out of cheese"); });
        dp.backward(loss, 4);
        if (mine && where == "step") throw std::runtime_error("out of cheese");
        optimizer.step();
        train(comm, *model, dp, optimizer, 2);
      });
      EXPECT_TRUE(has(text, "rank 1 failed: out of cheese")) << zero << where << text;
    }
}

TEST(DataParallelFailure, GradientsThatAreNotFiniteEndTheRun) {
  for (int zero = 0; zero <= 3; ++zero) {
    const auto text = failure_of(2, [&](Communicator& comm) {
      const auto model = make_model("mlp", at::kFloat);
      DataParallel dp(*model, comm, {.zero = zero});
      AdamW optimizer(dp);
      train(comm, *model, dp, optimizer, 2);
      at::Tensor loss = model->loss_sum(0, 0, 4);
      if (comm.rank() == 1) loss = loss * std::numeric_limits<double>::quiet_NaN();
      dp.backward(loss, 4);
      optimizer.step();
    });
    EXPECT_TRUE(has(text, "the gradient norm of step 3 is nan")) << text;
    EXPECT_TRUE(has(text, "is not finite; the parameters are still those")) << text;
  }
}

TEST(DataParallelMemory, IsWhatTheFormulasSay) {
  struct Wide : torch::nn::Module {
    Wide() {
      for (int i = 0; i < 20; ++i)
        layers.push_back(register_module(cat("l", i), torch::nn::Linear(256, 256)));
    }
    at::Tensor forward(at::Tensor x) {
      for (auto& layer : layers) x = at::tanh(layer(x));
      return x;
    }
    std::vector<torch::nn::Linear> layers;
  };
  for (int zero = 0; zero <= 3; ++zero)
    for (const auto precision : {Precision::AsIs, Precision::Bf16})
      on_ranks(4, [&](Communicator& comm) {
        Wide model;
        DataParallel dp(model, comm,
                        {.zero = zero, .precision = precision, .bucket_bytes = 1 << 18});
        AdamW optimizer(dp);
        dp.backward(model.forward(at::ones({1, 256})).sum(), 1);
        optimizer.step();
        dp.backward(model.forward(at::ones({1, 256})).sum(), 1);
        optimizer.step();
        const bool half = precision == Precision::Bf16;
        const plan::Widths widths{
            .parameter = half ? 2 : 4, .gradient = 4, .optimizer = half ? 12 : 8};
        const auto want = plan::memory_of(dp.layout(), zero, widths);
        auto got = dp.memory();
        got.optimizer += optimizer.state_bytes();
        EXPECT_EQ(got.parameters, want.parameters) << zero;
        EXPECT_EQ(got.gradients, want.gradients) << zero;
        EXPECT_EQ(got.optimizer, want.optimizer) << zero;
        EXPECT_LE(got.pool, want.pool) << zero;
        // The bytes of the ZeRO paper, without padding.
        const double count = double(dp.layout().num_elements()), d = 4;
        const double formula[] = {count * (half ? 18 : 16), count * (half ? 6 + 12 / d : 8 + 8 / d),
                                  count * (half ? 2 + 16 / d : 4 + 12 / d),
                                  count * (half ? 18 : 16) / d};
        EXPECT_NEAR(double(got.total() - got.pool), formula[zero], 0.02 * formula[zero]);
      });
}

}  // namespace
}  // namespace yoke::parallel
