// SPDX-License-Identifier: Apache-2.0
// Every mix of pipeline, data and tensor parallelism trains as one device does.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "yoke/parallel/attention.h"
#include "yoke/parallel/cross_entropy.h"
#include "yoke/parallel/pipeline.h"
#include "yoke/parallel/ranks_test.h"
#include "yoke/parallel/recompute.h"
#include "yoke/plan/generate.h"

namespace yoke::parallel {
namespace {

constexpr int64_t kWords = 48, kDim = 64, kHeads = 8, kKvHeads = 8, kTime = 16;
constexpr int kBlocks = 16, kLayers = kBlocks + 2, kSteps = 2;
const std::string kEmbedding = "0.words.weight", kHead = cat(kLayers - 1, ".head.weight");

struct Start : torch::nn::Module {
  explicit Start(const TensorAxis& axis)
      : words(register_module("words", Embedding(kWords, kDim))),
        positions(register_parameter("positions", at::empty({kTime, kDim}))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& text) {  // [batch, tokens]
    const int64_t count = axis.scatters() ? axis.part_of(kTime, "tokens") : kTime;
    return words(text) + positions.narrow(0, axis.scatters() ? axis.rank() * count : 0, count);
  }
  void split() { words->split_words(axis); }
  Embedding words;
  at::Tensor positions;
  const TensorAxis axis;
};

struct Block : torch::nn::Module {
  explicit Block(const TensorAxis& axis)
      : norm1(register_module("norm1", LayerNorm(torch::nn::LayerNormOptions({kDim})))),
        norm2(register_module("norm2", LayerNorm(torch::nn::LayerNormOptions({kDim})))),
        attention(register_module(
            "attention",
            Attention(AttentionOptions{.dim = kDim, .heads = kHeads, .kv_heads = kKvHeads}))),
        up(register_module("up", Linear(kDim, 2 * kDim))),
        down(register_module("down", Linear(2 * kDim, kDim))),
        axis(axis) {}
  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1(x));
    return x + down(at::gelu(up(norm2(x))));
  }
  void split() {
    attention->split_heads(axis);
    up->split_outputs(axis);
    down->split_inputs(axis);
  }
  LayerNorm norm1, norm2;
  Attention attention;
  Linear up, down;
  const TensorAxis axis;
};

struct End : torch::nn::Module {
  explicit End(const TensorAxis& axis)
      : norm(register_module("norm", LayerNorm(torch::nn::LayerNormOptions({kDim})))),
        head(register_module("head", Linear(torch::nn::LinearOptions(kDim, kWords).bias(false)))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }
  void split() { head->split_outputs(axis); }
  LayerNorm norm;
  Linear head;
  const TensorAxis axis;
};

template <typename Module>
Layer made(int place, const TensorAxis& axis) {
  const auto module = std::make_shared<Module>(axis);
  {
    const at::NoGradGuard no_grad;
    for (auto& item : module->named_parameters()) {
      const std::string name = cat(place, ".", item.key());
      item.value().set_data(
          normal(name == kHead ? kEmbedding : name, item.value().sizes(), 0.2).to(test_device()));
    }
  }
  module->split();
  return layer(module);
}

std::vector<LayerFactory> make_layers(const TensorAxis& axis) {
  std::vector<LayerFactory> layers;
  for (int place = 0; place < kLayers; ++place)
    layers.push_back([=] {
      return place == 0             ? made<Start>(place, axis)
             : place == kLayers - 1 ? made<End>(place, axis)
                                    : made<Block>(place, axis);
    });
  return layers;
}

// A micro-batch of `batch` samples.
at::Tensor tokens(int step, int64_t place, int64_t batch) {
  const Rng rng(3, "tokens", uint64_t(step));
  at::Tensor text = at::empty({batch, kTime + 1}, at::kLong);
  for (int64_t i = 0; i < text.numel(); ++i)
    text.mutable_data_ptr<int64_t>()[i] =
        int64_t(rng.below(uint64_t(place * text.numel() + i), kWords));
  return text.to(test_device());
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& text, const TensorAxis& axis) {
  return cross_entropy_sum(logits.reshape({-1, logits.size(-1)}),
                           text.narrow(1, 1, kTime).reshape({-1}), axis);
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, DataParallel& dp) {
  if (name == "adamw") return std::make_unique<AdamW>(dp, AdamWOptions{{.lr = 0.01, .clip = 1}});
  return std::make_unique<Sgd>(dp, SgdOptions{{.lr = 0.05, .clip = 0.5}, 0.9});
}

struct Trial {
  MeshShape shape = {};
  std::string schedule = "1f1b";
  int zero = 0;
  bool sequence = false;
  std::string optimizer = "sgd";
  int micro = 1;
  int64_t batch = 1;         // samples of a micro-batch
  std::string mistake = {};  // planted
  std::string text() const {
    return cat("pp ", shape.pp, " dp ", shape.dp, " tp ", shape.tp, ", ", schedule, " of ", micro,
               ", ZeRO ", zero, sequence ? ", sequence" : "", ", ", optimizer);
  }
};

struct Outcome {
  std::vector<double> losses = {}, norms = {};
  std::map<std::string, at::Tensor> parameters = {};
  std::string torn = {};  // a parameter that is not the same on all ranks that have it
};

Outcome alone(const std::string& optimizer_name, int64_t samples, int64_t batch) {
  Outcome outcome;
  on_ranks(1, [&](Communicator& comm) {
    torch::nn::Module module;
    std::vector<Layer> layers;
    for (int place = 0; place < kLayers; ++place) {
      layers.push_back(make_layers({})[size_t(place)]());
      module.register_module(std::to_string(place), layers.back().module);
    }
    module.named_parameters()[kHead].set_data(module.named_parameters()[kEmbedding]);
    DataParallel dp(module, comm);
    const auto optimizer = make_optimizer(optimizer_name, dp);
    for (int step = 0; step < kSteps; ++step) {
      double sum = 0;
      for (int64_t sample = 0; sample < samples; ++sample) {
        const at::Tensor text = tokens(step, sample, batch);
        at::Tensor x = text.narrow(1, 0, kTime);
        for (const auto& layer : layers) x = layer.forward(x);
        const at::Tensor loss = at::cross_entropy_loss(
            x.view({-1, kWords}), text.narrow(1, 1, kTime).reshape({-1}), {}, at::Reduction::Sum);
        sample + 1 < samples ? dp.accumulate(loss, double(batch * kTime))
                             : dp.backward(loss, double(batch * kTime));
        sum += loss.item<double>();
      }
      outcome.losses.push_back(sum / double(samples * batch * kTime));
      outcome.norms.push_back(optimizer->step().grad_norm());
    }
    for (const auto& item : module.named_parameters())
      outcome.parameters[item.key()] = item.value().detach().to(at::kCPU, false, true);
  });
  return outcome;
}

// The smallest that the schedule's rule allows.
int smallest_micro(const std::string& name, int ranks) {
  for (int micro = 1;; ++micro) try {
      plan::make_schedule(name, {.ranks = ranks, .micro_batches = micro});
      return micro;
    } catch (const Error&) {
      if (micro > 64) throw;
    }
}

Outcome together(const Trial& run) {
  Outcome outcome;
  Mutex mutex;
  on_ranks(run.shape.size(), [&](Communicator& world) {
    const MeshGroups mesh(world, run.shape);
    const TensorAxis axis{mesh.tp, run.sequence};
    PipelineOptions options{.ties = {{kEmbedding, kHead}}, .sequence = run.sequence};
    options.data.zero = run.zero;
    if (run.mistake == "untied") options.ties.clear();
    if (run.mistake == "partial norms") options.sequence = false;
    Pipeline pipeline(
        make_layers(axis),
        plan::make_schedule(run.schedule, {.ranks = run.shape.pp, .micro_batches = run.micro}),
        mesh, options);
    const auto optimizer = make_optimizer(run.optimizer, pipeline.data());
    for (int step = 0; step < kSteps; ++step) {
      auto text = [&](int micro) {
        return tokens(step, mesh.dp.rank() * run.micro + micro, run.batch);
      };
      const auto loss =
          pipeline.run({.input = [&](int micro) { return text(micro).narrow(1, 0, kTime); },
                        .loss =
                            [&](const at::Tensor& output, int micro) {
                              at::Tensor sum = loss_of(output, text(micro), axis);
                              double count = double(run.batch * kTime);
                              if (run.mistake == "times dp") sum = sum * run.shape.dp;
                              if (run.mistake == "counted twice" && mesh.dp.rank() == 0) count *= 2;
                              if (run.mistake == "one skipped" && micro == 0 && mesh.dp.rank() == 0)
                                sum = sum * 0;
                              return Pipeline::Loss{sum, count};
                            }});
      const double norm = optimizer->step().grad_norm();
      const at::Tensor sum = at::zeros({1}, at::device(test_device()).dtype(at::kDouble));
      if (loss.sum.defined() && mesh.tp.rank() == 0) sum.add_(loss.sum);
      world.all_reduce(sum).wait();
      if (world.rank() > 0) continue;
      outcome.losses.push_back(sum.item<double>() /
                               double(run.micro * run.shape.dp * run.batch * kTime));
      outcome.norms.push_back(norm);
    }
    pipeline.data().gathered([&] {
      for (const auto& part : pipeline.data().units()) {
        std::map<std::string, ParameterSplit> splits;
        for (const auto& split : splits_of(*part)) splits[split.name] = split;
        for (const auto& item : part->named_parameters()) {
          at::Tensor value = item.value().detach();
          if (splits.contains(item.key())) value = join_parts(value, splits[item.key()], axis);
          value = value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);  // others read it
          MutexLock lock(mutex);
          const auto known = outcome.parameters.try_emplace(item.key(), value).first;
          if (!at::equal(known->second, value)) outcome.torn = item.key();
        }
      }
    });
  });
  return outcome;
}

class MeshParity : public testing::Test {
 protected:
  void expect_parity(Trial run) {
    run.micro = smallest_micro(run.schedule, run.shape.pp);
    SCOPED_TRACE(run.text());
    EXPECT_EQ(difference(run), "");
  }

  // The first from one device; empty: none.
  static std::string difference(const Trial& run) {
    const int64_t samples = int64_t(run.micro) * run.shape.dp;
    auto& truth = truths_[{run.optimizer, samples, run.batch}];
    if (truth.losses.empty()) truth = alone(run.optimizer, samples, run.batch);
    const auto outcome = together(run);
    auto far = [](double a, double b) { return !(std::abs(a - b) <= 1e-11 * std::abs(a)); };
    for (size_t i = 0; i < truth.losses.size(); ++i) {
      if (far(truth.norms[i], outcome.norms[i]))
        return cat("norm ", truth.norms[i], " and ", outcome.norms[i], " of step ", i);
      if (far(truth.losses[i], outcome.losses[i]))
        return cat("loss ", truth.losses[i], " and ", outcome.losses[i], " of step ", i);
    }
    if (!outcome.torn.empty()) return cat("ranks have another ", outcome.torn);
    if (truth.parameters.size() != outcome.parameters.size()) return "parameters are missing";
    // AdamW divides what is nearly 0 by what is nearly 0.
    const double tolerance = run.optimizer == "sgd" ? 1e-11 : 1e-9;
    for (const auto& [name, value] : truth.parameters) {
      const double most = (value - outcome.parameters.at(name)).abs().max().item<double>();
      if (!(most < tolerance)) return cat(most, " in ", name);
    }
    return "";
  }

 private:
  static inline std::map<std::tuple<std::string, int64_t, int64_t>, Outcome> truths_;
};

using MeshParitySlow = MeshParity;

std::vector<MeshShape> factorisations(int ranks) {
  std::vector<MeshShape> shapes;
  for (int pp = 1; pp <= ranks; ++pp)
    for (int dp = 1; pp * dp <= ranks; ++dp)
      if (ranks % (pp * dp) == 0) shapes.push_back({pp, dp, ranks / (pp * dp)});
  return shapes;
}

}  // namespace

TEST_F(MeshParitySlow, EveryFactorisationOfEightRanks) {
  for (const auto& shape : factorisations(8))
    for (const std::string schedule : {"1f1b", "interleaved", "zbv"})
      for (const int zero : {0, 1})
        for (const bool sequence : {false, true})
          if (!sequence || shape.tp > 1)
            expect_parity(
                {.shape = shape, .schedule = schedule, .zero = zero, .sequence = sequence});
}

TEST_F(MeshParity, OfFourRanks) {
  for (const std::string schedule : {"1f1b", "zbv"})
    for (const int zero : {0, 1, 3})
      for (const bool sequence : {false, true})
        expect_parity(
            {.shape = {2, 1, 2}, .schedule = schedule, .zero = zero, .sequence = sequence});
}

TEST_F(MeshParity, WithSeveralSamplesInAMicroBatch) {
  for (const auto& shape : {MeshShape{2, 1, 2}, MeshShape{1, 2, 2}})
    expect_parity({.shape = shape, .schedule = "zbv", .sequence = true, .batch = 3});
}

TEST_F(MeshParitySlow, WithAdamW) {
  for (const auto& shape : factorisations(8))
    for (const std::string schedule : {"1f1b", "interleaved", "zbv"})
      expect_parity({.shape = shape,
                     .schedule = schedule,
                     .zero = 1,
                     .sequence = shape.tp > 1,
                     .optimizer = "adamw"});
}

TEST_F(MeshParitySlow, OfOtherSizes) {
  const std::vector<MeshShape> shapes = {{1, 2, 2}, {2, 1, 2}, {4, 1, 1}, {3, 2, 1}, {3, 1, 2},
                                         {3, 2, 2}, {6, 1, 2}, {4, 2, 2}, {2, 2, 4}, {8, 2, 1}};
  for (const auto& shape : shapes)
    for (const int zero : {0, 2, 3})
      expect_parity({.shape = shape,
                     .schedule = zero ? "zbv" : "interleaved",
                     .zero = zero,
                     .sequence = shape.tp > 1});
}

TEST_F(MeshParitySlow, SeesPlantedMistakes) {
  for (const std::string mistake :
       {"", "untied", "partial norms", "times dp", "counted twice", "one skipped"}) {
    const auto found =
        difference({.shape = {2, 2, 2}, .sequence = true, .micro = 2, .mistake = mistake});
    EXPECT_EQ(found.empty(), mistake.empty()) << mistake << ": " << found;
  }
}

// Ranks of a layer against the same layer on one rank: what comes out, and every gradient.
TEST(TensorParallel, AttentionSharesKeysAndValues) {
  auto run = [](int ranks, int64_t heads, int64_t kv_heads, bool sequence) {
    std::map<std::string, at::Tensor> seen;
    on_ranks(ranks, [&](Communicator& world) {
      const TensorAxis axis{world, sequence};
      Attention attention(
          AttentionOptions{.dim = 24, .heads = heads, .kv_heads = kv_heads, .head_dim = 4});
      {
        const at::NoGradGuard no_grad;
        for (auto& item : attention->named_parameters())
          item.value().set_data(normal(item.key(), item.value().sizes(), 0.3).to(test_device()));
      }
      attention->split_heads(axis);
      const at::Tensor x = normal("x", {2, 8, 24}, 1).to(test_device()).requires_grad_(true);
      const at::Tensor y = collect_tokens(attention(scatter_tokens(x, axis)), axis);
      (y * normal("y", y.sizes(), 1).to(test_device())).sum().backward();
      std::map<std::string, at::Tensor> mine{{"x", x.grad()}, {"y", y.detach()}};
      for (const auto& split :
           std::vector<ParameterSplit>{{"qkv.weight", 0, {heads * 4, kv_heads * 4, kv_heads * 4}},
                                       {"qkv.bias", 0, {heads * 4, kv_heads * 4, kv_heads * 4}},
                                       {"out.weight", 1, {heads * 4}}})
        mine[split.name] =
            join_parts(attention->named_parameters()[split.name].grad(), split, axis);
      if (world.rank() == 0) seen = mine;
    });
    return seen;
  };
  for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{4, 4}, {8, 4}, {8, 2}}) {
    const auto one = run(1, heads, kv_heads, false);
    for (const bool sequence : {false, true})
      for (const auto& [name, value] : run(2, heads, kv_heads, sequence))
        EXPECT_LT((value - one.at(name)).abs().max().item<double>(), 1e-12)
            << name << " " << heads << " " << kv_heads << " " << sequence;
  }
  EXPECT_TRUE(has(failure_of(4,
                             [](Communicator& world) {
                               Attention(AttentionOptions{
                                             .dim = 24, .heads = 8, .kv_heads = 2, .head_dim = 4})
                                   ->split_heads({world});
                             }),
                  "2 attention heads of keys and values cannot be cut into 4 equal parts"));
  EXPECT_TRUE(
      has(failure_of(2, [](Communicator& world) { Embedding(33, 4)->split_words({world}); }),
          "33 words of an embedding cannot be cut into 2 equal parts"));
}

TEST(TensorParallel, CrossEntropyNeedsNoWholeLogits) {
  const at::Tensor logits = normal("logits", {5, 12}, 3),
                   targets = at::tensor({0, 11, 5, -100, 6}, at::kLong);
  const at::Tensor whole = logits.clone().requires_grad_(true);
  const at::Tensor expected = at::cross_entropy_loss(whole, targets, {}, at::Reduction::Sum);
  (expected * 2).backward();
  for (const int ranks : {1, 2, 3, 4})
    comm::run_ranks(ranks, [&](Communicator& world) {
      const int64_t words = 12 / world.size(), first = world.rank() * words;
      const at::Tensor mine = logits.narrow(1, first, words).clone().requires_grad_(true);
      const at::Tensor loss = cross_entropy_sum(mine, targets, {world});
      (loss * 2).backward();
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
      EXPECT_LT((mine.grad() - whole.grad().narrow(1, first, words)).abs().max().item<double>(),
                1e-12);
    });
}

// In few bits the sums are made in float32, and the gradient has the logits' type.
TEST(TensorParallel, CrossEntropyOfFewBits) {
  const at::Tensor logits = normal("logits", {64, 512}, 3).to(test_device(), at::kBFloat16),
                   targets = at::arange(64, at::device(test_device()).dtype(at::kLong)) * 8;
  const at::Tensor exact = logits.to(at::kDouble).requires_grad_(true);
  const at::Tensor expected = at::cross_entropy_loss(exact, targets, {}, at::Reduction::Sum);
  expected.backward();
  on_ranks(2, [&](Communicator& world) {
    const at::Tensor mine = logits.narrow(1, world.rank() * 256, 256).clone().requires_grad_(true);
    const at::Tensor loss = cross_entropy_sum(mine, targets, {world});
    loss.backward();
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
    ASSERT_EQ(mine.grad().scalar_type(), at::kBFloat16);
    const at::Tensor truth = exact.grad().narrow(1, world.rank() * 256, 256);
    EXPECT_LT((mine.grad() - truth).abs().max().item<double>(), 0.004);  // half a unit of bfloat16
  });
}

TEST(TensorParallel, RefusesWordsThatAreNotThere) {
  if (!test_device().is_cpu()) GTEST_SKIP() << "a GPU stops for good";
  for (const int64_t wrong : {-1, 12, 100}) {
    const at::Tensor words =
        at::tensor({3, 0}, at::kLong).index_put_({at::tensor(1)}, at::tensor(wrong));
    EXPECT_TRUE(has(failure_of(2,
                               [&](Communicator& world) {
                                 Embedding embedding(12, 4);
                                 embedding->split_words({world});
                                 embedding(words);
                               }),
                    cat("there is no word ", wrong, " among 12")));
    EXPECT_TRUE(has(failure_of(2,
                               [&](Communicator& world) {
                                 cross_entropy_sum(at::zeros({2, 6}), words, {world});
                               }),
                    cat("there is no word ", wrong, " among 12")));
  }
}

// A word that stands for nothing has no gradient, whoever has it.
TEST(TensorParallel, EmbeddingKeepsItsPadding) {
  const at::Tensor words = at::tensor({1, 9, 9, 4, 9, 11}, at::kLong).to(test_device());
  auto gradient = [&](int ranks) {
    at::Tensor result;
    on_ranks(ranks, [&](Communicator& world) {
      Embedding embedding(torch::nn::EmbeddingOptions(12, 4).padding_idx(9));
      embedding->to(test_device(), at::kDouble);
      const TensorAxis axis{world};
      embedding->split_words(axis);
      at::Tensor y = embedding(words);
      (y * normal("y", y.sizes(), 1).to(test_device())).sum().backward();
      const at::Tensor all = join_parts(embedding->weight.grad(), {"weight", 0, {12}}, axis);
      if (world.rank() == 0) result = all;
    });
    return result;
  };
  const at::Tensor one = gradient(1);
  EXPECT_EQ(one[9].abs().sum().item<double>(), 0);
  EXPECT_GT(one[4].abs().sum().item<double>(), 0);
  EXPECT_TRUE(at::equal(one, gradient(2)));
}

TEST(TensorParallel, PartsDropWhatTheWholeWould) {
  const at::Tensor x = normal("x", {2, 6, 8}, 1);
  const Rng rng(4, "dropout");
  const at::Tensor whole = dropout(x, 0.4, rng, 7);
  for (const int64_t dim : {0, 1, 2, -1, -2})
    for (const int64_t parts : {1, 2}) {
      const int64_t size = x.size(dim), count = size / parts;
      std::vector<at::Tensor> pieces;
      for (int64_t r = 0; r < parts; ++r)
        pieces.push_back(
            dropout(x.narrow(dim, r * count, count), 0.4, rng, {dim, r * count, size}, 7));
      EXPECT_TRUE(at::equal(at::cat(pieces, dim), whole)) << dim << " in " << parts;
    }
  EXPECT_THROW(dropout(x, 0.4, rng, {1, 3, 6}), Error);
}

}  // namespace yoke::parallel
