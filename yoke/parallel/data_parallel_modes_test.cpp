// SPDX-License-Identifier: Apache-2.0
// Data parallelism in fewer bits, when something fails, and how much memory it takes.
#include <malloc.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>

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
    EXPECT_DOUBLE_EQ(dp.loss_scale().value, 1e7 / std::pow(2, num_skipped));
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
      EXPECT_NEAR(optimizer.step().grad_norm(), std::sqrt(20), 0.01);
    });
}

class FailingOptimizer final : public Optimizer {
 public:
  explicit FailingOptimizer(DataParallel& dp) : Optimizer(dp, {}, {}) {}

 private:
  void update(const Batch&, const Scaling&) override { throw std::runtime_error("out of cheese"); }
};

void out_of_memory() { at::empty({int64_t{1} << 50}, at::device(test_device())); }

TEST(DataParallelFailure, EndsEveryRankWithTheFirstCause) {
  if (!tries(3)) GTEST_SKIP() << "wants 3 ranks";
  const std::map<std::string, std::function<void(const at::Tensor&)>> faults = {
      {"forward", [](const at::Tensor&) { throw std::runtime_error("out of cheese"); }},
      {"backward",
       [](const at::Tensor& x) {
         x.register_hook([](const at::Tensor&) { throw std::runtime_error("out of cheese"); });
       }},
      {"memory in forward", [](const at::Tensor&) { out_of_memory(); }},
      {"memory in backward",
       [](const at::Tensor& x) { x.register_hook([](const at::Tensor&) { out_of_memory(); }); }},
      {"optimizer", nullptr}};
  for (int zero = 0; zero <= 3; ++zero)
    for (const auto& [where, fault] : faults) {
      const auto text = failure_of(3, [&](Communicator& comm) {
        const auto model = make_model("mlp", at::kFloat);
        DataParallel dp(*model, comm,
                        {.zero = zero, .bucket_bytes = 1000, .first_bucket_bytes = 300});
        AdamW optimizer(dp);
        train(comm, *model, dp, optimizer, 2);
        if (comm.rank() == 1) {
          dynamic_cast<Mlp&>(*model).in_the_middle = fault;
          FailingOptimizer failing(dp);
          train(comm, *model, dp, fault ? static_cast<Optimizer&>(optimizer) : failing, 1);
        }
        train(comm, *model, dp, optimizer, 2);
      });
      EXPECT_TRUE(has(text, "rank 1")) << zero << where << text;
      EXPECT_TRUE(has(text, "out of cheese") || has(text, "memory")) << zero << where << text;
    }
}

// A communicator of which something fails when its turn comes.
class FailingBackend final : public comm::Backend {
 public:
  FailingBackend(Communicator whole, int until) : whole_(std::move(whole)), until_(until) {}
  int rank() const override { return whole_.rank(); }
  int size() const override { return whole_.size(); }
  const std::string& name() const override { return whole_.name(); }
  comm::Work issue(comm::Operation operation) override {
    count();
    return whole_.backend().issue(std::move(operation));
  }
  comm::Work issue_group(std::vector<comm::Operation> messages) override {
    return whole_.backend().issue_group(std::move(messages));
  }
  std::shared_ptr<Backend> split(int color, int key) override {
    return whole_.backend().split(color, key);
  }
  void abort(const std::string& reason) override { whole_.abort(reason); }
  void leave() override { whole_.leave(); }
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    count();
    return whole_.allocate(sizes, options);
  }
  comm::Capabilities capabilities() const override { return whole_.capabilities(); }

 private:
  void count() {
    if (until_-- == 0) throw std::runtime_error("out of cheese");
  }
  const Communicator whole_;
  int until_;
};

// Wherever in three steps the communication of one rank fails, or memory for it.
TEST(DataParallelFailure, InCommunicationEndsEveryRank) {
  if (!tries(2)) GTEST_SKIP() << "wants 2 ranks";
  for (int zero = 0; zero <= 3; ++zero)
    for (int until = 0;; until += over_nccl() ? 17 : 1) {
      std::string text;
      try {
        on_ranks(2, [&](Communicator& whole) {
          Communicator comm = whole;
          if (whole.rank() == 1)
            comm = Communicator(std::make_shared<FailingBackend>(whole, until));
          const auto model = make_model("mlp", at::kFloat);
          DataParallel dp(*model, comm,
                          {.zero = zero, .bucket_bytes = 1000, .first_bucket_bytes = 300});
          AdamW optimizer(dp);
          train(comm, *model, dp, optimizer, 3);
        });
        ASSERT_GT(until, 20);
        break;  // it lasted
      } catch (const Error& error) {
        EXPECT_TRUE(has(error.what(), "rank 1")) << error.what();
        EXPECT_TRUE(has(error.what(), "out of cheese")) << zero << " " << until << error.what();
      }
    }
}

// One rank that catches an error has lost the step, and nothing else.
TEST(DataParallelFailure, IsForgottenByOneRankThatGoesOn) {
  for (int zero = 0; zero <= 3; ++zero) {
    auto run = [&](bool faulty) {
      std::vector<double> losses;
      on_ranks(1, [&](Communicator& comm) {
        const auto model = make_model("mlp", at::kFloat);
        DataParallel dp(*model, comm,
                        {.zero = zero, .bucket_bytes = 1000, .first_bucket_bytes = 300});
        AdamW optimizer(dp);
        train(comm, *model, dp, optimizer, 2);
        auto& middle = dynamic_cast<Mlp&>(*model).in_the_middle;
        if (faulty) {
          middle = [](const at::Tensor& x) {
            x.register_hook([](const auto&) { out_of_memory(); });
          };
          EXPECT_THROW(train(comm, *model, dp, optimizer, 1), std::exception);
          middle = nullptr;
        }
        losses = train(comm, *model, dp, optimizer, 3);
      });
      return losses;
    };
    EXPECT_EQ(run(true), run(false)) << zero;
  }
}

// The same for gradients that are not finite: nothing of them is left.
TEST(DataParallelFailure, OfAStepIsForgottenByThoseWhoGoOn) {
  if (!test_device().is_cpu() || !tries(2)) GTEST_SKIP() << "wants 2 ranks on the CPU";
  for (int zero = 0; zero <= 3; ++zero)
    on_ranks(2, [&](Communicator& comm) {
      const auto model = make_model("mlp", at::kFloat), other = make_model("mlp", at::kFloat);
      DataParallel dp(*model, comm, {.zero = zero}), good(*other, comm, {.zero = zero});
      Sgd optimizer(dp, {{.lr = 0.1}, 0.9}), good_optimizer(good, {{.lr = 0.1}, 0.9});
      train(comm, *model, dp, optimizer, 2);
      dp.backward(model->loss_sum(0, 0, 4) * std::numeric_limits<double>::quiet_NaN(), 4);
      EXPECT_THROW(optimizer.step(), Error);
      const auto losses = train(comm, *model, dp, optimizer, 2);
      train(comm, *other, good, good_optimizer, 2);
      EXPECT_EQ(losses, train(comm, *other, good, good_optimizer, 2)) << zero;
    });
}

// Ranks that gather other buckets of equal sizes would compute with each other's weights.
TEST(DataParallelFailure, RanksThatUseOtherParametersUnderZero3AreTold) {
  const auto text = failure_of(2, [](Communicator& comm) {
    std::vector<std::shared_ptr<torch::nn::LinearImpl>> layers;
    std::vector<DataParallel::UnitFactory> factories;
    for (int i = 0; i < 3; ++i)
      factories.emplace_back([&] {
        layers.push_back(std::make_shared<torch::nn::LinearImpl>(8, 8));
        return layers.back();
      });
    DataParallel dp(factories, comm);
    AdamW optimizer(dp);
    const at::Tensor x = layers[0]->forward(at::ones({2, 8}));
    dp.backward(layers[size_t(1 + comm.rank())]->forward(x).sum(), 2);
    optimizer.step();
  });
  EXPECT_TRUE(has(text, "in step 1 the ranks have gathered other parameters")) << text;
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
      dp.finish();  // a GPU's host is told now
    });
    EXPECT_TRUE(has(text, "the gradient norm of step 3 is nan")) << text;
    EXPECT_TRUE(has(text, "; the parameters are still those")) << text;
    EXPECT_EQ(has(text, "' is not finite"), test_device().is_cpu()) << text;
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
        dp.gathered([] {});
        EXPECT_EQ(dp.memory().pool, got.pool) << "what was gathered stays, ZeRO " << zero;
        // The bytes of the ZeRO paper, without padding.
        const double count = double(dp.layout().num_elements()), d = 4;
        const double formula[] = {count * (half ? 18 : 16), count * (half ? 6 + 12 / d : 8 + 8 / d),
                                  count * (half ? 2 + 16 / d : 4 + 12 / d),
                                  count * (half ? 18 : 16) / d};
        EXPECT_NEAR(double(got.total() - got.pool), formula[zero], 0.02 * formula[zero]);
      });
}

// What the process has held at most, with four ranks in it, in bytes above what it held before.
int64_t measured_peak(int zero) {
  auto status = [](const std::string& name) {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
      if (line.starts_with(name)) return std::stoll(line.substr(line.find(':') + 1)) * 1024;
    return 0LL;
  };
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const int64_t before = status("VmRSS");
  comm::run_ranks(4,
                  [&](Communicator& comm) {
                    std::unique_ptr<DataParallel> dp;
                    std::vector<std::shared_ptr<torch::nn::LinearImpl>> layers;
                    torch::nn::Module whole;
                    for (int i = 0; i < 32; ++i)
                      layers.push_back(whole.register_module(
                          cat("l", i), std::make_shared<torch::nn::LinearImpl>(500, 500)));
                    dp = std::make_unique<DataParallel>(
                        whole, comm, DataParallelOptions{.zero = zero, .bucket_bytes = 1'900'000});
                    AdamW optimizer(*dp);
                    comm.barrier();
                    if (comm.rank() == 0) {
                      malloc_trim(0);  // what the modules were made in
                      std::ofstream("/proc/self/clear_refs") << "5";
                    }
                    comm.barrier();
                    for (int step = 0; step < 3; ++step) {
                      at::Tensor x = at::ones({1, 500});
                      for (const auto& layer : layers) x = at::tanh(layer->forward(x));
                      dp->backward(x.sum(), 1);
                      optimizer.step();
                    }
                  },
                  {.threads_per_rank = 1});
  return status("VmHWM") - before;
}

// 8 M parameters, 4 bytes for each of weight, gradient and two moments.
TEST(DataParallelMemory, OfTheProcessFallsWithEveryStage) {
  if (!std::ofstream("/proc/self/clear_refs"))
    GTEST_SKIP() << "the kernel does not begin a peak anew";
  ::mallopt(M_MMAP_THRESHOLD, 128 << 10);  // what is freed goes back, and is not there to use again
  std::vector<double> mib;
  for (int zero = 0; zero <= 3; ++zero) mib.push_back(double(measured_peak(zero)) / (1 << 20));
  const std::vector<double> formula{489, 306, 214, 122};  // of the ZeRO paper, four ranks, no pools
  for (size_t zero = 0; zero <= 3; ++zero) {
    EXPECT_GT(mib[zero], 0.8 * formula[zero]) << testing::PrintToString(mib);
    EXPECT_LT(mib[zero], 1.2 * formula[zero] + 48) << testing::PrintToString(mib);
    EXPECT_LT(mib[zero], zero > 0 ? mib[zero - 1] : 1e9) << testing::PrintToString(mib);
  }
}

TEST(DataParallelPrecision, Fp16RaisesItsScaleAfterManyGoodSteps) {
  on_ranks(2, [](Communicator& comm) {
    torch::nn::Linear model(4, 1);
    DataParallel dp(*model, comm, {.precision = Precision::Fp16, .loss_scale = 8});
    Sgd optimizer(dp);
    dp.set_loss_scale({.value = 8, .num_good = 1998});
    for (const double want : {8.0, 16.0, 16.0}) {
      dp.backward(model(at::ones({1, 4})).sum(), 1);
      EXPECT_FALSE(optimizer.step().skipped);
      EXPECT_EQ(dp.loss_scale().value, want);
    }
    EXPECT_THROW(dp.set_loss_scale({.value = 0}), Error);
  });
}

}  // namespace
}  // namespace yoke::parallel
