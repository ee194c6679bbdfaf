// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/trainer.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/saved.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/models/gpt.h"
#include "yoke/models/llama.h"
#include "yoke/models/mlp.h"
#include "yoke/train/spike_guard.h"

namespace yoke::train {
namespace {

using comm::Communicator;

constexpr int64_t kBatch = 12;

models::Model small_gpt(at::ScalarType dtype = at::kDouble) {
  return models::make_gpt(
      {.layers = 4, .dim = 16, .heads = 4, .vocab = 24, .seq = 8, .dtype = dtype});
}

models::Model small_llama(int64_t layers, int64_t kv_heads) {
  return models::make_llama({.layers = layers,
                             .dim = 16,
                             .heads = 8,
                             .vocab = 24,
                             .seq = 8,
                             .kv_heads = kv_heads,
                             .ffn = 24,
                             .qkv_bias = true,
                             .dtype = at::kDouble});
}

void on_ranks(int ranks, Trainer& trainer) {
  comm::run_ranks(ranks, [&](Communicator& world) { EXPECT_EQ(trainer.fit(world), 0); },
                  {.threads_per_rank = 1});
}

// Losses by step.
std::map<int64_t, double> train(const models::Model& model, TrainerOptions options) {
  options.batch = kBatch;
  options.lr = {.lr = 0.01, .steps = 8};
  options.timeout = std::chrono::seconds(30);
  std::map<int64_t, double> losses;
  Trainer trainer(model, data::synthetic_words(24, 8, 3), options);
  trainer.callbacks.on_step = [&](const Step& step) { losses[step.step] = step.loss; };
  on_ranks(options.plan.num_ranks(), trainer);
  return losses;
}

class Training : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) /
              cat("yoke_train_", ::getpid(), "_",
                  testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

using TrainingSlow = Training;

const std::vector<std::string> kPlans = {
    "",
    "dp=2",
    "dp=3 micro=2",
    "dp=2 zero=1",
    "dp=4 zero=2",
    "dp=2 zero=3 micro=3",
    "tp=2",
    "tp=4 sequence=yes",
    "pp=3 micro=3",
    "pp=2 micro=4 schedule=zbv",
    "dp=2 tp=2 zero=3 sequence=yes",
    "pp=2 dp=2 tp=2 micro=2 zero=2 schedule=interleaved",
};

}  // namespace

// Shared keys and values, a gate and rotary positions, under every plan what they are on one rank.
TEST_F(Training, LlamaIsTheSameUnderEveryPlan) {
  const auto llama = small_llama(4, 4);
  const auto truth = train(llama, {.steps = 3});
  EXPECT_LT(truth.at(3), truth.at(1));
  for (const auto& text : kPlans) {
    const auto losses = train(llama, {.plan = plan::parse_plan(text), .steps = 3});
    for (const auto& [step, loss] : truth) EXPECT_NEAR(losses.at(step), loss, 1e-10) << text;
  }
}

// The whole matrix of eight ranks: every pp x dp x tp, with schedules and stages of ZeRO in turn.
TEST_F(TrainingSlow, LlamaUnderEveryPlanOfEight) {
  const auto llama = small_llama(6, 8);
  const auto truth = train(llama, {.steps = 2});
  const std::vector<std::string> schedules{"1f1b", "gpipe", "interleaved", "zb-h1", "zbv"};
  size_t number = 0;
  for (int pp = 1; pp <= 8; pp *= 2)
    for (int dp = 1; pp * dp <= 8 && kBatch % dp == 0; dp *= 2)
      for (int zero = 0; zero <= 3; ++zero) {
        std::string text = cat("pp=", pp, " dp=", dp, " tp=", 8 / pp / dp, " zero=", zero);
        if (zero % 2 == 1 && pp * dp < 8) text += " sequence=yes";
        if (pp > 1)  // two stages of a rank want 16 layers with pp = 8
          text += cat(" micro=", pp == 4 && dp == 2 ? 3 : kBatch / dp,
                      " schedule=", pp * dp == 8 ? "1f1b" : schedules[number++ % schedules.size()]);
        const auto losses = train(llama, {.plan = plan::parse_plan(text), .steps = 2});
        for (const auto& [step, loss] : truth) EXPECT_NEAR(losses.at(step), loss, 1e-10) << text;
      }
}

// A run stopped under any plan goes on under any other as if nothing had been.
TEST_F(TrainingSlow, GoesOnUnderAnyPlan) {
  const auto truth = train(small_gpt(), {.steps = 5});
  for (size_t from = 0; from < kPlans.size(); ++from) {
    const auto saved = folder_ / cat(from);
    const auto first = train(
        small_gpt(), {.plan = plan::parse_plan(kPlans[from]), .steps = 3, .checkpoints = saved});
    for (const auto& [step, loss] : first) EXPECT_NEAR(loss, truth.at(step), 1e-10);
    ASSERT_TRUE(checkpoint::Saved(*checkpoint::latest(saved)).verify().empty());
    for (size_t to = 0; to < kPlans.size(); ++to) {
      SCOPED_TRACE(cat("'", kPlans[from], "' to '", kPlans[to], "'"));
      const auto copy = folder_ / "copy";
      std::filesystem::copy(saved, copy, std::filesystem::copy_options::recursive);
      const auto rest = train(
          small_gpt(),
          {.plan = plan::parse_plan(kPlans[to]), .steps = 5, .checkpoints = copy, .resume = true});
      EXPECT_EQ(rest.size(), 2u);
      for (const auto& [step, loss] : rest) EXPECT_NEAR(loss, truth.at(step), 1e-10);
      std::filesystem::remove_all(copy);
    }
  }
}

// The same plan gives the same bits, losses and weights, however often it is stopped.
TEST_F(Training, GoesOnBitByBit) {
  for (const std::string text : {"", "dp=2 zero=1", "pp=2 dp=2 micro=2 schedule=zb-h1"})
    for (const std::string optimizer : {"adamw", "sgd", "lion"}) {
      const TrainerOptions options{.plan = plan::parse_plan(text), .optimizer = optimizer};
      auto run = [&](const std::string& name, std::vector<int64_t> stops) {
        std::map<int64_t, double> losses;
        for (const int64_t steps : stops) {
          auto some = options;
          some.steps = steps;
          some.checkpoints = folder_ / name;
          some.resume = true;
          losses.merge(train(small_gpt(at::kFloat), some));
        }
        return losses;
      };
      std::filesystem::remove_all(folder_);
      EXPECT_EQ(run("whole", {6}), run("stopped", {1, 4, 6})) << text << optimizer;
      const checkpoint::Saved one(*checkpoint::latest(folder_ / "whole")),
          two(*checkpoint::latest(folder_ / "stopped"));
      ASSERT_EQ(one.tensors().size(), two.tensors().size());
      for (const auto& [name, tensor] : one.tensors())
        EXPECT_TRUE(at::equal(one.whole(name), two.whole(name))) << name;
    }
}

TEST_F(Training, TrainsVectorsAndFewBits) {
  const auto run = [](const models::Model& model, std::shared_ptr<data::Dataset> dataset,
                      TrainerOptions options) {
    std::vector<double> losses;
    options.steps = 30;
    options.batch = 16;
    options.lr = {.lr = 0.02, .steps = 30};
    Trainer trainer(model, std::move(dataset), options);
    trainer.callbacks.on_step = [&](const Step& step) { losses.push_back(step.loss); };
    on_ranks(options.plan.num_ranks(), trainer);
    return losses;
  };
  const auto mlp = models::make_mlp({.layers = 3, .dim = 8});
  const auto one = run(mlp, data::synthetic_vectors(8, 1), {});
  const auto three =
      run(mlp, data::synthetic_vectors(8, 1), {.plan = plan::parse_plan("pp=3 tp=2 micro=4")});
  EXPECT_LT(one.back(), one.front() * 0.8);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], three[i], 1e-4);
  const auto words = data::synthetic_words(24, 8, 3);
  const auto exact = run(small_gpt(at::kFloat), words, {});
  for (const auto precision : {parallel::Precision::Bf16, parallel::Precision::Fp16}) {
    const auto few = run(small_gpt(at::kFloat), words, {.precision = precision});
    EXPECT_NEAR(few.back(), exact.back(), 0.3);  // float16 skips steps until its scale fits
  }
}

TEST_F(Training, LearnsAndSaysWhatItDoes) {
  std::vector<Step> steps;
  std::vector<int64_t> saved;
  Trainer trainer(
      small_gpt(at::kFloat), data::synthetic_words(24, 8, 3),
      {.plan = plan::parse_plan("dp=2"),
       .steps = 40,
       .batch = 16,
       .lr = {.shape = parallel::LrSchedule::Shape::Cosine, .lr = 0.02, .warmup = 4, .steps = 40},
       .checkpoints = folder_,
       .save_every = 10,
       .keep = 2});
  trainer.callbacks.on_step = [&](const Step& step) { steps.push_back(step); };
  trainer.callbacks.on_save = [&](int64_t step, Duration) { saved.push_back(step); };
  on_ranks(2, trainer);
  ASSERT_EQ(steps.size(), 40u);
  EXPECT_NEAR(steps[0].loss, std::log(24.0), 0.2);
  EXPECT_LT(steps[39].loss, 2.0);
  EXPECT_NEAR(steps[0].lr, 0.005, 1e-9);
  EXPECT_GT(steps[0].tokens_per_s, 0);
  EXPECT_GT(steps[0].grad_norm, 0);
  EXPECT_EQ(saved, (std::vector<int64_t>{10, 20, 30, 40}));
  EXPECT_EQ(checkpoint::list(folder_).size(), 2u);
}

// Numbers that are not, in the samples of one step.
struct Poisoned : data::Dataset {
  int64_t size() const override { return whole->size(); }
  data::Batch batch(const std::vector<int64_t>& samples) const override {
    auto result = whole->batch(samples);
    for (size_t i = 0; i < samples.size(); ++i)
      if (samples[i] >= 5 * 8 && samples[i] < 6 * 8) result.target[int64_t(i)].fill_(NAN);
    return result;
  }
  std::shared_ptr<data::Dataset> whole = data::synthetic_vectors(8, 1);
};

TEST_F(Training, DoesAsToldWithNumbersThatAreNot) {
  using OnNan = TrainerOptions::OnNan;
  auto run = [&](OnNan on_nan, std::vector<std::string>& trouble) {
    std::vector<int64_t> steps;
    std::filesystem::remove_all(folder_);
    Trainer trainer(models::make_mlp({.layers = 2, .dim = 8}), std::make_shared<Poisoned>(),
                    {.plan = plan::parse_plan("dp=2"),
                     .steps = 8,
                     .batch = 8,
                     .shuffle = false,
                     .checkpoints = folder_,
                     .save_every = 2,
                     .on_nan = on_nan});
    trainer.callbacks.on_step = [&](const Step& step) { steps.push_back(step.step); };
    trainer.callbacks.on_trouble = [&](const std::string& what) { trouble.push_back(what); };
    on_ranks(2, trainer);
    return steps;
  };
  std::vector<std::string> none, skipped, back;
  try {
    run(OnNan::Stop, none);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the gradient norm of step 6 is"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(run(OnNan::Skip, skipped), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  ASSERT_EQ(skipped.size(), 1u);
  EXPECT_TRUE(skipped[0].starts_with("step 6: the loss is ")) << skipped[0];
  EXPECT_EQ(run(OnNan::Rollback, back), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 5, 6, 7, 8}));
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[1], "back to step 4, with the samples after these");
}

TEST_F(Training, GivesUpWhereNothingHelps) {
  using OnNan = TrainerOptions::OnNan;
  for (const auto on_nan : {OnNan::Skip, OnNan::Rollback})
    for (const auto precision : {parallel::Precision::AsIs, parallel::Precision::Fp16}) {
      std::filesystem::remove_all(folder_);
      Trainer trainer(models::make_mlp({.layers = 2, .dim = 8}), data::synthetic_vectors(8, 1),
                      {.steps = 10000,
                       .batch = 8,
                       .lr = {.lr = 1e38, .steps = 10000},
                       .clip = 0,
                       .precision = precision,
                       .checkpoints = folder_,
                       .save_every = 1,
                       .on_nan = on_nan});
      EXPECT_THROW(on_ranks(1, trainer), Error);
    }
}

// A scale is float16's own: one from another precision, or none, is not taken for it.
TEST_F(Training, GoesOnInAnotherPrecision) {
  auto run = [&](parallel::Precision precision, int64_t steps) {
    return train(small_gpt(at::kFloat),
                 {.steps = steps, .precision = precision, .checkpoints = folder_, .resume = true});
  };
  run(parallel::Precision::AsIs, 2);
  run(parallel::Precision::Fp16, 3);
  const auto scale = checkpoint::Saved(*checkpoint::latest(folder_)).value("loss_scale");
  EXPECT_GT(std::stod(scale), 1000);
  run(parallel::Precision::Bf16, 4);
  EXPECT_FALSE(checkpoint::Saved(*checkpoint::latest(folder_)).values().contains("loss_scale"));
}

TEST(SpikeGuard, KnowsASpikeFromNoiseAndGoesOnWhereItWas) {
  SpikeGuard guard(6), other(6), never(0);
  for (int i = 0; i < 100; ++i) {
    const double loss = 3 - 0.01 * i + 0.05 * std::sin(double(i * i));
    EXPECT_EQ(guard.see(loss), 0) << i;
    never.see(loss);
  }
  other.restore(guard.text());
  EXPECT_GT(guard.see(4), 6);
  EXPECT_GT(guard.see(4), 6);  // one spike does not make the next one usual
  EXPECT_EQ(guard.see(2), 0);
  EXPECT_EQ(never.see(400), 0);
  EXPECT_GT(other.see(4), 6);
  EXPECT_EQ(other.see(2), 0);
  EXPECT_EQ(other.text(), guard.text());
}

TEST_F(Training, EvaluatesOnWhatItDoesNotTrainOn) {
  std::map<std::string, std::vector<double>> losses;
  for (const std::string text : {"", "dp=2 zero=3", "pp=2 micro=2"}) {
    Trainer trainer(small_gpt(), data::part_of(data::synthetic_words(24, 8, 3), 0, 400),
                    {.plan = plan::parse_plan(text),
                     .steps = 30,
                     .batch = 8,
                     .lr = {.lr = 0.02, .steps = 30},
                     .eval_every = 10,
                     .val_fraction = 0.1});
    trainer.callbacks.on_eval = [&](int64_t, const Evaluated& result) {
      losses[text].push_back(result.loss);
    };
    on_ranks(trainer.options().plan.num_ranks(), trainer);
    ASSERT_EQ(losses[text].size(), 3u);
    EXPECT_LT(losses[text][2], losses[text][0]);
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(losses[text][i], losses[""][i], 1e-9);
  }
  EXPECT_THROW(Trainer(small_gpt(), data::part_of(data::synthetic_words(24, 8, 3), 0, 40),
                       {.eval_every = 1, .val_fraction = 0.1}),
               Error);
}

TEST_F(Training, RefusesABatchThatDoesNotDivide) {
  EXPECT_THROW(Trainer(small_gpt(), data::synthetic_words(24, 8, 3),
                       {.plan = plan::parse_plan("dp=3"), .batch = 16}),
               Error);
}

}  // namespace yoke::train
