// SPDX-License-Identifier: Apache-2.0
// What stands beside data parallelism: shares, recomputation, dropout, batch norm, replicas.
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <thread>

#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/batch_norm.h"
#include "yoke/parallel/models_test.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/parallel/recompute.h"
#include "yoke/parallel/replicas.h"
#include "yoke/parallel/shares.h"

namespace yoke::parallel {
namespace {

using comm::Communicator;
using namespace std::chrono_literals;

TEST(Shares, DivideABatchWithoutRest) {
  EXPECT_EQ(divide(10, {1, 1, 1}), (std::vector<int64_t>{4, 3, 3}));
  EXPECT_EQ(divide(12, {3, 1}), (std::vector<int64_t>{9, 3}));
  EXPECT_EQ(divide(1, {1, 100}), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(divide(0, {1, 2}), (std::vector<int64_t>{0, 0}));
  comm::run_ranks(3, [](Communicator& comm) {
    const Shares shares(comm, {1, 2, 3});
    const std::vector<std::pair<int64_t, int64_t>> want{{0, 2}, {2, 6}, {6, 12}};
    EXPECT_EQ(shares.part(12), want[size_t(comm.rank())]);
    EXPECT_THROW(Shares(comm, {1, 2}), Error);
    EXPECT_THROW(Shares(comm, {1, 0, 2}), Error);
  });
}

// A sample costs one millisecond on rank 0 and three on rank 1: together they can do 4/3 a
// millisecond. What is reported is what a sleep was meant to last, as a busy host lengthens it.
TEST(Shares, FoundOutTheyBringTheSumOfTheSpeeds) {
  comm::run_ranks(2, [](Communicator& comm) {
    torch::nn::Linear model(4, 1);
    DataParallel dp(*model, comm);
    Sgd optimizer(dp);
    auto shares = Shares::automatic(comm, 3);
    constexpr int64_t kBatch = 40;
    std::vector<double> seconds;
    for (int step = 0; step < 24; ++step) {
      const Time start = SteadyClock().now();  // before the others can begin
      comm.barrier();
      const auto [begin, end] = shares.part(kBatch);
      const auto cost = comm.rank() == 0 ? 1ms : 3ms;
      std::this_thread::sleep_for(cost * (end - begin));
      dp.backward(model(at::ones({end - begin, 4})).sum(), double(end - begin));
      shares.report(end - begin, cost * (end - begin));
      optimizer.step();
      comm.barrier();
      seconds.push_back(std::chrono::duration<double>(SteadyClock().now() - start).count());
    }
    EXPECT_NEAR(shares.values()[0] / shares.values()[1], 3, 1e-6);
    const double slow = seconds[1], fast = *std::min_element(seconds.begin() + 4, seconds.end());
    EXPECT_GT(slow, 0.060);
    EXPECT_LT(fast, 0.030 * 1.25) << "the sum of the speeds would take 30 ms";
  });
}

struct Deep : torch::nn::Module {
  explicit Deep(Checkpointing checkpointing) : checkpointing(checkpointing) {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module(cat("layer", i), torch::nn::Linear(16, 16)));
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters())
      item.value().copy_(normal(item.key(), item.value().sizes(), 0.3));
  }
  at::Tensor forward(at::Tensor x, int64_t step, int64_t first) {
    for (size_t i = 0; i < layers.size(); ++i) {
      auto part = [this, i, step, first](const at::Tensor& input) {
        const at::Tensor h = at::gelu(layers[i]->forward(input));
        return dropout(h, 0.2, Rng(5, cat("dropout", i), uint64_t(step)), first * 16);
      };
      x = checkpoint(checkpointing, int64_t(i), part, x);
    }
    return x;
  }
  Checkpointing checkpointing;
  std::vector<torch::nn::Linear> layers;
};

std::vector<at::Tensor> train_deep(Checkpointing checkpointing, int ranks, int zero,
                                   Precision precision = Precision::AsIs) {
  std::vector<at::Tensor> weights;
  std::mutex building;
  comm::run_ranks(
      ranks,
      [&](Communicator& comm) {
        std::unique_lock lock(building);
        Deep model(checkpointing);
        lock.unlock();
        DataParallel dp(model, comm,
                        {.zero = zero,
                         .precision = precision,
                         .bucket_bytes = 1200,
                         .first_bucket_bytes = 1200});
        AdamW optimizer(dp, {{.lr = 0.01}});
        for (int step = 0; step < 3; ++step) {
          const int64_t part = 12 / comm.size(), first = comm.rank() * part;
          const at::Tensor x =
              normal(cat("x", step), {part, 16}, 1, uint64_t(first * 16)).to(at::kFloat);
          dp.backward(model.forward(x, step, first).square().sum(), double(part));
          optimizer.step();
        }
        dp.gathered([&] {
          if (comm.rank() == 0)
            for (const auto& weight : model.parameters())
              weights.push_back(weight.detach().clone());
        });
      },
      {.threads_per_rank = 1});
  return weights;
}

TEST(Recompute, GivesTheSameBits) {
  for (const int zero : {0, 3})
    for (const auto precision : {Precision::AsIs, Precision::Bf16}) {
      const auto kept = train_deep(Checkpointing::None, 2, zero, precision);
      for (const auto how : {Checkpointing::Selective, Checkpointing::Full}) {
        const auto again = train_deep(how, 2, zero, precision);
        for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], again[i])) << zero;
      }
    }
}

TEST(Recompute, DropsWhatOneRankWouldDrop) {
  const auto one = train_deep(Checkpointing::None, 1, 0),
             three = train_deep(Checkpointing::Full, 3, 1);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::allclose(one[i], three[i], 1e-4, 1e-6));
  const at::Tensor dropped = dropout(at::ones({100, 100}), 0.3, Rng(1, "d"));
  EXPECT_NEAR(dropped.mean().item<double>(), 1, 0.03);
  EXPECT_NEAR((dropped == 0).to(at::kFloat).mean().item<double>(), 0.3, 0.02);
  EXPECT_TRUE(
      at::equal(dropped.narrow(0, 40, 7), dropout(at::ones({7, 100}), 0.3, Rng(1, "d"), 40 * 100)));
  EXPECT_THROW(dropout(dropped, 1, Rng(1, "d")), Error);
}

TEST(Recompute, KeepsLessForBackward) {
  auto size = [](Checkpointing checkpointing) {  // of the graph, in nodes
    Deep model(checkpointing);
    const at::Tensor y = model.forward(at::ones({2, 16}).requires_grad_(true), 0, 0);
    std::set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> next{y.grad_fn().get()};
    while (!next.empty()) {
      auto* node = next.back();
      next.pop_back();
      if (!node || !seen.insert(node).second) continue;
      for (const auto& edge : node->next_edges()) next.push_back(edge.function.get());
    }
    return seen.size();
  };
  EXPECT_LE(size(Checkpointing::Full), 4u * 2 + 1);  // one for each part, and what anchors it
  EXPECT_LT(size(Checkpointing::Full), size(Checkpointing::Selective));
  EXPECT_LT(size(Checkpointing::Selective), size(Checkpointing::None));
}

TEST(Recompute, TellsOfAParameterInTwoParts) {
  comm::run_ranks(1, [](Communicator& comm) {
    torch::nn::Linear model(4, 4);
    DataParallel dp(*model, comm);
    auto part = [&](const at::Tensor& x) { return model->forward(x); };
    const at::Tensor x = recompute(part, recompute(part, at::ones({1, 4})));
    try {
      dp.backward(x.sum(), 1);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("had its gradient twice"), std::string::npos);
    }
  });
}

TEST(BatchNorm, SynchronisedEqualsOneDevice) {
  const at::Tensor x = normal("x", {12, 3, 4, 4}, 2) + normal("m", {1, 3, 1, 1}, 3);
  at::Tensor want, want_mean, want_var, want_dx, want_dw;
  {
    torch::nn::BatchNorm2d norm(3);
    norm->to(at::kDouble);
    const at::Tensor input = x.detach().clone().requires_grad_(true);
    want = norm(input);
    want.sin().sum().backward();
    want_mean = norm->running_mean, want_var = norm->running_var;
    want_dx = input.grad(), want_dw = norm->weight.grad();
  }
  for (const int ranks : {1, 2, 3})
    comm::run_ranks(ranks, [&](Communicator& comm) {
      BatchNorm norm({.features = 3}, comm);
      norm.to(at::kDouble);
      const auto counts = divide(
          12, ranks == 3 ? std::vector<double>{1, 2, 3} : std::vector<double>(size_t(ranks), 1));
      int64_t begin = 0;
      for (int r = 0; r < comm.rank(); ++r) begin += counts[size_t(r)];
      const int64_t mine = counts[size_t(comm.rank())];
      const at::Tensor input = x.narrow(0, begin, mine).detach().clone().requires_grad_(true);
      const at::Tensor y = norm.forward(input);
      y.sin().sum().backward();
      EXPECT_TRUE(at::allclose(y, want.narrow(0, begin, mine), 1e-9, 1e-11));
      EXPECT_TRUE(at::allclose(input.grad(), want_dx.narrow(0, begin, mine), 1e-8, 1e-10));
      EXPECT_TRUE(at::allclose(norm.running_mean, want_mean, 1e-9, 1e-11));
      EXPECT_TRUE(at::allclose(norm.running_var, want_var, 1e-9, 1e-11));
      const at::Tensor dw = norm.weight.grad().clone();
      comm.all_reduce(dw).wait();
      EXPECT_TRUE(at::allclose(dw, want_dw, 1e-8, 1e-10));
      norm.eval();
      EXPECT_NO_THROW(norm.forward(input));
    });
}

// Statistics are made with the bits of float32, whatever the model computes in.
TEST(BatchNorm, KeepsItsStatisticsInFloat32) {
  const at::Tensor x = (normal("x", {12, 3, 4, 4}, 0.1) + 20).to(at::kFloat);
  for (const int ranks : {1, 2})
    comm::run_ranks(ranks, [&](Communicator& comm) {
      BatchNorm norm({.features = 3}, comm);
      DataParallel dp(norm, comm, {.precision = Precision::Bf16});
      const int64_t part = 12 / comm.size();
      const at::Tensor mine = x.narrow(0, comm.rank() * part, part).to(at::kBFloat16);
      const at::Tensor y = norm.forward(mine);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      dp.backward(y.to(at::kFloat).square().sum(), double(part));
      EXPECT_EQ(norm.running_var.scalar_type(), at::kFloat);
      const at::Tensor exact = x.to(at::kBFloat16).to(at::kDouble);
      const at::Tensor want = 0.9 + 0.1 * exact.transpose(0, 1).flatten(1).var(1);
      EXPECT_TRUE(at::allclose(norm.running_var.to(at::kDouble), want, 1e-4, 1e-6));
      norm.eval();
      EXPECT_NO_THROW(norm.forward(mine));
    });
}

TEST(Replicas, ScatterABatchAndGatherInOrder) {
  auto doubled = [](const at::Tensor& x) { return x * 2; };
  Replicas replicas({{doubled}, {doubled, at::kCPU, 3}, {doubled}});
  for (const int64_t batch : {1, 2, 7, 100}) {
    const at::Tensor x = at::arange(batch * 3).view({batch, 3});
    EXPECT_TRUE(at::equal(replicas.forward(x), x * 2));
  }
  EXPECT_THROW(replicas.forward(at::empty({0, 3})), Error);
  Replicas faulty({{doubled}, {[](const at::Tensor&) -> at::Tensor {
                     throw std::runtime_error("out of cheese");
                   }}});
  EXPECT_THROW(faulty.forward(at::ones({4})), std::runtime_error);
  EXPECT_THROW(Replicas({}), Error);
}

}  // namespace
}  // namespace yoke::parallel
