// SPDX-License-Identifier: Apache-2.0
// What DataParallel takes, gives and refuses.
#include "yoke/parallel/data_parallel.h"

#include <torch/csrc/jit/api/module.h>

#include <mutex>

#include "yoke/parallel/ranks_test.h"

namespace yoke::parallel {
namespace {

TEST(DataParallel, StartsEveryRankWithTheWeightsOfRankZero) {
  on_ranks(3, [](Communicator& comm) {
    const auto model = make_model("branches", at::kFloat);
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.add_(comm.rank());
    }
    const auto want = make_model("branches", at::kFloat);
    DataParallel dp(*model, comm, {.zero = 1});
    for (const auto& item : want->named_parameters())
      EXPECT_TRUE(at::equal(model->named_parameters()[item.key()], item.value())) << item.key();
  });
}

TEST(DataParallel, RefusesModelsThatDiffer) {
  const auto text = failure_of(2, [](Communicator& comm) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, comm.rank() + 2));
    DataParallel dp(*model, comm);
  });
  EXPECT_TRUE(has(text,
                  "the model of rank 1 is not that of rank 0: it has '1.weight [3, 4] Float' where "
                  "rank 0 has '1.weight [2, 4] Float'"))
      << text;
}

TEST(DataParallel, RefusesWhatItCannotUse) {
  on_ranks(1, [](Communicator& comm) {
    torch::nn::Linear model(4, 4);
    EXPECT_THROW(DataParallel(*model, comm, {.zero = 4}), Error);
    EXPECT_THROW(DataParallel(*model, comm, {.bucket_bytes = 0}), Error);
    model->bias.set_data(model->bias.to(at::kDouble));
    EXPECT_THROW(DataParallel(*model, comm), Error);
    for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
    EXPECT_THROW(DataParallel(*model, comm), Error);
  });
}

TEST(DataParallel, TellsOfAParameterThatLeftItsBuffer) {
  for (const int zero : {0, 3}) {
    const auto text = failure_of(2, [&](Communicator& comm) {
      const auto model = make_model("mlp", at::kFloat);
      DataParallel dp(*model, comm, {.zero = zero});
      model->to(at::kDouble);
      model->type = at::kDouble;
      dp.backward(model->loss_sum(0, 0, 4), 4);
    });
    EXPECT_TRUE(has(text, "' has left its buffer: it was moved, converted or replaced")) << text;
  }
}

TEST(DataParallel, TellsOfAGradientThatLeftItsBuffer) {
  const auto text = failure_of(2, [](Communicator& comm) {
    const auto model = make_model("mlp", at::kFloat);
    DataParallel dp(*model, comm);
    dp.accumulate(model->loss_sum(0, 0, 4), 4);
    model->zero_grad();
    dp.backward(model->loss_sum(0, 4, 8), 4);
  });
  EXPECT_TRUE(has(text, "has left its buffer: it was replaced or cleared (zero_grad)")) << text;
}

TEST(DataParallel, WantsBackwardBeforeAStepAndSomeSamples) {
  on_ranks(1, [](Communicator& comm) {
    const auto model = make_model("mlp", at::kFloat);
    DataParallel dp(*model, comm);
    AdamW optimizer(dp);
    EXPECT_THROW(optimizer.step(), Error);
    dp.accumulate(model->loss_sum(0, 0, 4), 4);
    EXPECT_THROW(optimizer.step(), Error);
    dp.backward(model->loss_sum(0, 0, 4), 0);
    EXPECT_NO_THROW(optimizer.step());
    dp.backward(model->loss_sum(0, 0, 4), 4);
    dp.accumulate(model->loss_sum(0, 0, 4), 4);
    EXPECT_THROW(optimizer.step(), Error);
    dp.backward(model->loss_sum(0, 0, 4), 4);
    EXPECT_NO_THROW(optimizer.step());
    dp.backward(model->loss_sum(0, 0, 4), 0);
    EXPECT_THROW(optimizer.step(), Error);
    EXPECT_THROW(dp.backward(at::ones({2}), 2), Error);
  });
}

// Two losses of the same samples, each with a backward pass, reduced twice.
TEST(DataParallel, AddsUpTwoLossesOfOneStep) {
  std::vector<at::Tensor> once;
  on_ranks(1, [&](Communicator& comm) {
    const auto model = make_model("mlp", at::kDouble);
    DataParallel dp(*model, comm);
    Sgd optimizer(dp, {{.lr = 0.1}});
    for (int step = 0; step < 3; ++step) {
      dp.backward(model->loss_sum(step, 0, 12) + 0.5 * model->loss_sum(step + 9, 0, 12), 12);
      optimizer.step();
    }
    for (const auto& parameter : model->parameters()) once.push_back(parameter.detach().clone());
  });
  for (int zero = 0; zero <= 3; ++zero)
    on_ranks(2, [&](Communicator& comm) {
      const auto model = make_model("mlp", at::kDouble);
      DataParallel dp(*model, comm,
                      {.zero = zero, .bucket_bytes = 3000, .first_bucket_bytes = 500});
      Sgd optimizer(dp, {{.lr = 0.1}});
      const int64_t begin = comm.rank() * 6;
      for (int step = 0; step < 3; ++step) {
        dp.backward(model->loss_sum(step, begin, begin + 6), 6);
        dp.backward(0.5 * model->loss_sum(step + 9, begin, begin + 6), 0);
        optimizer.step();
      }
      dp.gathered([&] {
        const auto parameters = model->parameters();
        for (size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(at::allclose(parameters[i], once[i], 1e-11, 1e-13)) << zero;
      });
    });
}

torch::jit::Module script() {
  torch::jit::Module module("net");
  module.register_parameter("w", normal("w", {6, 5}, 0.3).to(at::kFloat).requires_grad_(true),
                            false);
  module.register_parameter("b", normal("b", {6}, 0.3).to(at::kFloat).requires_grad_(true), false);
  module.register_parameter("v", normal("v", {1, 6}, 0.3).to(at::kFloat).requires_grad_(true),
                            false);
  module.define(R"(
    def forward(self, x):
      return torch.linear(torch.tanh(torch.linear(x, self.w, self.b)), self.v)
  )");
  return module;
}

TEST(DataParallel, TrainsTorchScriptLikeAnyModule) {
  const at::Tensor x = normal("x", {12, 5}, 1).to(at::kFloat);
  auto losses = [&](int ranks, int zero) {
    std::vector<float> result;
    std::mutex building;
    on_ranks(ranks, [&](Communicator& comm) {
      torch::jit::Module module;
      {
        const std::lock_guard lock(building);
        module = script();
      }
      DataParallel dp(module, comm, {.zero = zero, .bucket_bytes = 100, .first_bucket_bytes = 100});
      AdamW optimizer(dp, {{.lr = 0.05}});
      const int64_t part = 12 / ranks;
      for (int step = 0; step < 5; ++step) {
        const at::Tensor mine = x.narrow(0, comm.rank() * part, part);
        const at::Tensor loss =
            (module.forward({mine}).toTensor().squeeze(1) - mine.sum(1)).square().sum();
        dp.backward(loss, double(part));
        optimizer.step();
        const at::Tensor total = loss.detach().clone();
        comm.all_reduce(total).wait();
        if (comm.rank() == 0) result.push_back(total.item<float>());
      }
    });
    return result;
  };
  const auto one = losses(1, 0);
  EXPECT_LT(one.back(), one.front());
  for (int zero = 0; zero <= 3; ++zero) {
    const auto two = losses(2, zero);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(two[i], one[i], 1e-5 * one[i]) << zero;
  }
}

// In TorchScript tied weights may be two tensors over one memory.
TEST(DataParallel, AddsTheGradientsOfTensorsThatShareMemory) {
  struct Tied : torch::nn::Module {
    Tied() {
      a = register_parameter("a", normal("a", {4, 4}, 0.5));
      b = register_parameter("b", a.detach().requires_grad_(true));
    }
    at::Tensor a, b;
  };
  for (int zero = 0; zero <= 3; ++zero)
    on_ranks(2, [&](Communicator& comm) {
      Tied tied;
      const at::Tensor x = normal("x", {2, 4}, 1, uint64_t(8 * comm.rank()));
      const at::Tensor all = normal("x", {4, 4}, 1);
      const at::Tensor w = tied.a.detach().clone().requires_grad_(true);
      at::tanh(all.mm(w)).mm(w).square().sum().backward();
      DataParallel dp(tied, comm, {.zero = zero});
      EXPECT_EQ(dp.layout().parameters.size(), 1u);
      Sgd optimizer(dp, {{.lr = 0.1}});
      for (int pass = 0; pass < 2; ++pass) {
        const at::Tensor loss = at::tanh(x.mm(tied.a)).mm(tied.b).square().sum();
        pass == 0 ? dp.accumulate(loss, 1) : dp.backward(loss, 1);
      }
      optimizer.step();
      dp.gathered([&] {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::allclose(tied.a, w - 0.1 * 2 * w.grad() / 4, 1e-11, 1e-13)) << zero;
        EXPECT_TRUE(at::equal(tied.a, tied.b));
      });
    });
}

TEST(DataParallel, KeepsTheModelWholeAfterItHasGone) {
  on_ranks(2, [](Communicator& comm) {
    const auto model = make_model("mlp", at::kFloat);
    {
      DataParallel dp(*model, comm, {.zero = 1});
      AdamW optimizer(dp);
      train(comm, *model, dp, optimizer, 1);
    }
    for (const auto& parameter : model->parameters()) {  // the last gather was awaited
      const at::Tensor most = parameter.detach().clone(), least = most.clone();
      comm.all_reduce(most, comm::ReduceOp::Max).wait();
      comm.all_reduce(least, comm::ReduceOp::Min).wait();
      EXPECT_TRUE(at::equal(most, least));
    }
    { DataParallel dp(*model, comm, {.zero = 3}); }
    EXPECT_EQ(model->parameters()[0].numel(), 0);
  });
}

// By all ranks; or by one who reads a file on rank 0 alone, and then has it on all.
TEST(DataParallel, KeepsWhatIsWrittenBeforeTheFirstStep) {
  for (const bool all_write : {true, false})
    for (const auto precision : {Precision::AsIs, Precision::Bf16})
      for (int zero = 0; zero <= 1; ++zero)
        on_ranks(2, [&](Communicator& comm) {
          const auto model = make_model("mlp", at::kFloat);
          DataParallel dp(*model, comm, {.zero = zero, .precision = precision});
          if (all_write || comm.rank() == 0) {
            const at::NoGradGuard no_grad;
            model->named_parameters()["layers.1.weight"].fill_(0.25);
          }
          Sgd optimizer(dp, {{.lr = 0}});
          train(comm, *model, dp, optimizer, 1);
          const at::Tensor weight = model->named_parameters()["layers.1.weight"];
          EXPECT_TRUE((weight == 0.25).all().item<bool>()) << zero;
          dp.check_replicas();
        });
}

TEST(DataParallel, TakesSparseGradients) {
  for (int zero = 0; zero <= 3; ++zero)
    on_ranks(2, [&](Communicator& comm) {
      torch::nn::Embedding model(torch::nn::EmbeddingOptions(8, 4).sparse(true));
      {
        const at::NoGradGuard no_grad;
        model->weight.fill_(1);
      }
      DataParallel dp(*model, comm, {.zero = zero});
      Sgd optimizer(dp, {{.lr = 1}});
      dp.backward(model(at::full({3}, comm.rank(), at::kLong)).sum(), 3);
      optimizer.step();
      dp.gathered([&] {
        EXPECT_EQ(model->weight[1][0].item<float>(), 0.5);
        EXPECT_EQ(model->weight[2][0].item<float>(), 1);
      });
    });
}

TEST(DataParallel, NamesTheReplicaThatDiverged) {
  const auto text = failure_of(3, [](Communicator& comm) {
    const auto model = make_model("mlp", at::kFloat);
    DataParallel dp(*model, comm, {.check_every = 2});
    Sgd optimizer(dp);
    train(comm, *model, dp, optimizer, 1);
    if (comm.rank() == 1) {
      const at::NoGradGuard no_grad;
      model->named_parameters()["layers.2.bias"][3] += 1e-6;
    }
    train(comm, *model, dp, optimizer, 1);
  });
  EXPECT_TRUE(has(text, "rank 1 of world has another 'layers.2.bias' than most")) << text;
}

// Parts that are made one after the other, the last tied to the first.
TEST(DataParallel, BuildsAModelShardByShard) {
  auto linear = [](int i) {
    auto layer = std::make_shared<torch::nn::LinearImpl>(16, 16);
    const at::NoGradGuard no_grad;
    for (auto& item : layer->named_parameters())
      item.value().copy_(normal(cat(i, item.key()), item.value().sizes(), 0.3));
    return layer;
  };
  struct Tied : torch::nn::Module {
    explicit Tied(const at::Tensor& given) { weight = register_parameter("weight", given); }
    at::Tensor weight;
  };
  const at::Tensor x = normal("x", {12, 16}, 1).to(at::kFloat);
  auto run = [&](bool in_parts, int ranks, Precision precision, bool alias = false) {
    std::vector<float> losses;
    on_ranks(ranks, [&](Communicator& comm) {
      std::vector<std::shared_ptr<torch::nn::LinearImpl>> layers;
      std::unique_ptr<DataParallel> dp;
      torch::nn::Module whole;
      if (in_parts) {
        std::vector<DataParallel::UnitFactory> factories;
        for (int i = 0; i < 5; ++i)
          factories.emplace_back([&, i] {
            for (const auto& layer : layers)  // of those before nothing but a shard is left
              EXPECT_EQ(layer->weight.storage().data(), nullptr);
            return layers.emplace_back(linear(i));
          });
        at::Tensor head;
        factories.emplace_back([&] {
          head = layers[0]->weight;
          if (alias) head = head.detach().requires_grad_(true);
          return std::make_shared<Tied>(head);
        });
        dp = std::make_unique<DataParallel>(factories, comm,
                                            DataParallelOptions{.zero = 3, .precision = precision});
        EXPECT_EQ(dp->units().size(), 6u);
        EXPECT_EQ(dp->layout().buckets.size(), 6u);
        EXPECT_EQ(dp->layout().parameters.size(), 10u);
      } else {
        for (int i = 0; i < 5; ++i) layers.push_back(whole.register_module(cat("l", i), linear(i)));
        dp = std::make_unique<DataParallel>(whole, comm,
                                            DataParallelOptions{.zero = 3, .precision = precision});
      }
      AdamW optimizer(*dp, {{.lr = 0.01}});
      const int64_t part = 12 / comm.size();
      for (int step = 0; step < 4; ++step) {
        at::Tensor h = x.narrow(0, comm.rank() * part, part);
        for (const auto& layer : layers) h = at::tanh(layer->forward(h));
        const auto* tied = in_parts ? dynamic_cast<Tied*>(dp->units()[5].get()) : nullptr;
        const at::Tensor& head = tied ? tied->weight : layers[0]->weight;
        const at::Tensor loss = at::linear(h, head).to(at::kFloat).square().sum();
        dp->backward(loss, double(part));
        optimizer.step();
        const at::Tensor total = loss.detach().clone();
        comm.all_reduce(total).wait();
        if (comm.rank() == 0) losses.push_back(total.item<float>());
      }
    });
    return losses;
  };
  for (const auto precision : {Precision::AsIs, Precision::Bf16})
    EXPECT_EQ(run(true, 2, precision), run(false, 2, precision));
  EXPECT_EQ(run(true, 2, Precision::AsIs, /*alias=*/true), run(false, 2, Precision::AsIs));
  const auto one = run(false, 1, Precision::AsIs), three = run(true, 3, Precision::AsIs);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], three[i], 1e-5 * one[i]);
  EXPECT_LT(one.back(), one.front());
  on_ranks(1, [&](Communicator& comm) {
    const std::vector<DataParallel::UnitFactory> none;
    EXPECT_THROW(DataParallel(none, comm), Error);
    EXPECT_THROW(DataParallel({[&] { return linear(0); }}, comm, {.zero = 2}), Error);
  });
}

TEST(DataParallel, EvaluatesBetweenSteps) {
  auto run = [](int zero, bool evaluate) {
    std::vector<double> losses;
    on_ranks(2, [&](Communicator& comm) {
      const auto model = make_model("gpt", at::kDouble);
      DataParallel dp(*model, comm,
                      {.zero = zero, .bucket_bytes = 8000, .first_bucket_bytes = 900});
      AdamW optimizer(dp, {{.lr = 0.01}});
      std::vector<double> mine;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = model->loss_sum(step, 6 * comm.rank(), 6 * comm.rank() + 6);
        dp.backward(loss, 6);
        optimizer.step();
        mine.push_back(loss.item<double>());
        const at::NoGradGuard no_grad;
        for (int i = 0; evaluate && i < 2; ++i) model->loss_sum(100, 0, 3);
      }
      if (comm.rank() == 0) losses = mine;
    });
    return losses;
  };
  for (int zero = 0; zero <= 3; ++zero) EXPECT_EQ(run(zero, false), run(zero, true)) << zero;
}

}  // namespace
}  // namespace yoke::parallel
