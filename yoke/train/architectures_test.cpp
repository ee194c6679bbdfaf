// SPDX-License-Identifier: Apache-2.0
// What docs/models.md says of each architecture: under which plans it is what it is on one rank.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <unistd.h>

#include <fstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/data/sampler.h"
#include "yoke/models/loadable.h"
#include "yoke/models/whole.h"
#include "yoke/train/resolve.h"
#include "yoke/train/trainer.h"

namespace yoke::train {
namespace {

namespace fs = std::filesystem;
using models::Architecture;

// Losses of four steps, and of an evaluation after them.
std::vector<double> train(const Architecture& architecture,
                          const std::shared_ptr<data::Dataset>& dataset, const std::string& plan,
                          const fs::path& checkpoints = {}) {
  TrainerOptions options{.plan = plan::parse_plan(plan),
                         .steps = 4,
                         .batch = 12,
                         .lr = {.lr = 0.05, .steps = 4},
                         .optimizer = "sgd",
                         .checkpoints = checkpoints,
                         .timeout = std::chrono::seconds(30),
                         .eval_every = 4,
                         .val_fraction = 0.2};
  options.values["architecture"] = models::to_json(architecture);
  Trainer trainer(models::make_model(architecture), dataset, options);
  std::vector<double> losses;
  trainer.callbacks.on_step = [&](const Step& step) { losses.push_back(step.loss); };
  trainer.callbacks.on_eval = [&](int64_t, const Evaluated& result) {
    losses.push_back(result.loss);
    losses.push_back(result.accuracy);
  };
  comm::run_ranks(options.plan.num_ranks(), [&](comm::Communicator& world) { trainer.fit(world); },
                  {.threads_per_rank = 1});
  return losses;
}

// In float64, so that only what is wrong differs.
class Exact final : public data::Dataset {
 public:
  explicit Exact(std::shared_ptr<data::Dataset> of) : of_(std::move(of)) {}
  int64_t size() const override { return of_->size(); }
  data::Batch batch(const std::vector<int64_t>& samples) const override {
    auto batch = of_->batch(samples);
    batch.input = batch.input.to(at::kDouble);
    return batch;
  }

 private:
  const std::shared_ptr<data::Dataset> of_;
};

std::shared_ptr<data::Dataset> pictures() {
  return std::make_shared<Exact>(data::part_of(data::synthetic_images(2, 8, 3, 5), 0, 120));
}

// `micro`: how many parts a batch has, which changes norms over it.
void expect_same(const Architecture& architecture, const std::shared_ptr<data::Dataset>& dataset,
                 const std::vector<std::string>& plans, int micro = 1) {
  const auto truth = train(architecture, dataset, micro == 1 ? "" : cat("micro=", micro));
  ASSERT_EQ(truth.size(), 6u);
  for (const auto& plan : plans) {
    const auto losses = train(architecture, dataset, plan);
    ASSERT_EQ(losses.size(), truth.size()) << plan;
    for (size_t i = 0; i < truth.size(); ++i)
      EXPECT_NEAR(losses[i], truth[i], 1e-8) << plan << ", " << i;
  }
}

class Architectures : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  // A module of TorchScript with two layers, one buffer, and such a forward.
  std::string script(const std::string& forward) const {
    torch::jit::Module module("m");
    module.register_parameter("first", at::arange(48, at::kDouble).view({8, 6}).sin() * 0.3, false);
    module.register_parameter("second", at::arange(24, at::kDouble).view({3, 8}).cos() * 0.3,
                              false);
    module.register_buffer("shift", at::ones({8}, at::kDouble) * 0.1);
    module.define(forward);
    const auto path = (folder_ / "module.pt").string();
    module.save(path);
    return path;
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / cat("yoke_architectures_", ::getpid());
};

std::string refusal_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "it was taken";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), text.npos) << text;
}

// Six numbers, and which of three they are.
class Sorted final : public data::Dataset {
 public:
  int64_t size() const override { return 60; }
  data::Batch batch(const std::vector<int64_t>& samples) const override {
    const at::Tensor numbers = at::tensor(samples, at::kLong);
    return {(numbers.unsqueeze(1) * at::arange(1, 7)).sin().to(at::kDouble), numbers % 3};
  }
};

}  // namespace

TEST_F(Architectures, ResnetUnderReplicasZeroAndLayers) {
  const models::ResnetOptions options{
      .width = 4, .channels = 2, .size = 8, .classes = 3, .dtype = at::kDouble};
  expect_same(options, pictures(),
              {"dp=2", "dp=2 zero=1", "dp=3 zero=2", "dp=2 zero=3", "pp=2 schedule=layer",
               "pp=2 dp=2 schedule=layer zero=1"});
  expect_same(options, pictures(), {"pp=2 micro=2", "pp=3 micro=2 schedule=gpipe"}, 2);
}

TEST_F(Architectures, ResnetOf34And50) {
  for (const int64_t depth : {34, 50}) {
    const models::ResnetOptions options{
        .depth = depth, .width = 2, .channels = 2, .size = 8, .classes = 3, .dtype = at::kDouble};
    expect_same(options, pictures(), {"dp=2 zero=3"});
  }
  // As torchvision counts them.
  EXPECT_EQ(models::make_resnet({.depth = 18}).num_parameters, 11689512);
  EXPECT_EQ(models::make_resnet({.depth = 34}).num_parameters, 21797672);
  EXPECT_EQ(models::make_resnet({.depth = 50}).num_parameters, 25557032);
}

TEST_F(Architectures, VitUnderAllPlans) {
  const models::VitOptions options{.layers = 2,
                                   .dim = 16,
                                   .heads = 4,
                                   .patch = 4,
                                   .channels = 2,
                                   .size = 8,
                                   .classes = 3,
                                   .dtype = at::kDouble};
  expect_same(options, pictures(),
              {"dp=2", "dp=3 zero=1", "dp=2 zero=2 micro=2", "dp=2 zero=3", "pp=2 micro=2",
               "pp=2 schedule=layer", "tp=2", "tp=4", "pp=2 dp=2 tp=2 micro=2 zero=2"});
  EXPECT_EQ(models::make_vit({}).num_parameters, 86567656);  // ViT-B/16, as torchvision counts
}

TEST_F(Architectures, MlpSortsUnderAllPlans) {
  const models::MlpOptions options{
      .layers = 2, .dim = 12, .sample = {2, 8, 8}, .classes = 3, .dtype = at::kDouble};
  expect_same(options, pictures(),
              {"dp=2", "dp=2 zero=3", "tp=2", "pp=2 micro=2", "pp=2 schedule=layer",
               "pp=2 dp=2 tp=2 micro=2 zero=1"});
}

TEST_F(Architectures, TorchScriptUnderReplicasAndZero) {
  const std::vector<std::string> plans{"dp=2", "dp=3 zero=1", "dp=2 zero=2 micro=2", "dp=2 zero=3"};
  const auto dataset = std::make_shared<Sorted>();
  expect_same(models::ScriptOptions{.path = script(R"(
def forward(self, x):
    return torch.linear(torch.tanh(torch.linear(x, self.first) + self.shift), self.second)
)")},
              dataset, plans);
  // One that gives the loss itself.
  const models::ScriptOptions with_loss{.path = script(R"(
def forward(self, x, y):
    z = torch.linear(torch.tanh(torch.linear(x, self.first) + self.shift), self.second)
    return -torch.log_softmax(z, 1).gather(1, y.unsqueeze(1)).mean()
)")};
  expect_same(with_loss, dataset, plans);
  const auto losses = train(with_loss, dataset, "dp=2");
  EXPECT_LT(losses[3], losses[0]);
}

// Saved for use, with weights that are one, of another type: trained as a module in training is,
// and used again.
TEST_F(Architectures, TorchScriptOfManyKindsIsTrainedAndUsed) {
  torch::jit::Module part("part"), module("m");
  part.register_parameter("weight", at::eye(6, at::kDouble) * 0.5, false);
  part.register_buffer("seen", at::zeros({1}, at::kLong));
  part.define("def forward(self, x):\n    return torch.linear(x, self.weight)\n");
  module.register_attribute("training", c10::BoolType::get(), true);
  part.register_attribute("training", c10::BoolType::get(), true);
  module.register_module("one", part);
  module.register_module("two", part);  // the same once more
  module.register_parameter("head", at::arange(18, at::kDouble).view({3, 6}).sin(), false);
  module.define(R"(
def forward(self, x):
    x = self.two.forward(torch.tanh(self.one.forward(x)))
    if self.training:
        x = x * 2
    return torch.linear(x, self.head)
)");
  module.eval();
  const auto path = (folder_ / "tied.pt").string();
  module.save(path);
  const auto dataset = std::make_shared<Sorted>();
  expect_same(models::ScriptOptions{.path = path}, dataset, {"dp=2", "dp=2 zero=3"});
  const auto losses =
      train(models::ScriptOptions{.path = path}, dataset, "dp=2", folder_ / "checkpoints");
  const auto loaded = models::open_loadable(folder_);
  EXPECT_FALSE(loaded->declared());
  std::vector<int64_t> kept;
  for (int64_t i = 48; i < 60; ++i) kept.push_back(i);
  const auto batch = dataset->batch(kept);
  const at::Tensor logits = loaded->run({batch.input})[0];
  EXPECT_NEAR(at::cross_entropy_loss(logits, batch.target).item<double>(), losses[4], 1e-9);
  // The first loss is that of a module in training, though it was saved for use.
  module.train();
  data::Sampler sampler(48, true, 1);
  std::vector<int64_t> first;
  for (int64_t i = 0; i < 12; ++i) first.push_back(sampler.at(i));
  const auto seen = dataset->batch(first);
  EXPECT_NEAR(
      at::cross_entropy_loss(module.forward({seen.input}).toTensor(), seen.target).item<double>(),
      losses[0], 1e-9);
}

TEST_F(Architectures, WhatATorchScriptFileCannotBe) {
  const auto refuses = [&](const std::string& path, const std::string& why) {
    expect_part(refusal_of([&] { models::make_script({.path = path}); }), why);
  };
  refuses("nowhere.pt", "there is no 'nowhere.pt'");
  std::ofstream(folder_ / "text.pt") << "hello";
  refuses((folder_ / "text.pt").string(), "is no TorchScript module");
  refuses(script("def forward(self, a, b, c):\n    return a\n"), "takes 3 arguments");
  refuses(script("def forward(self, a, b: float):\n    return a * b\n"), "takes float as 'b'");
}

// Packed documents are to each other as if they were alone.
TEST_F(Architectures, PackedDocumentsAreAlone) {
  std::ofstream(folder_ / "a.txt") << "the first text";
  std::ofstream(folder_ / "b.txt") << "another one, longer";
  std::ofstream(folder_ / "c.txt")
      << "and the third, to fill it up: so that there are two samples and more";
  const auto packed = data::open_text(folder_.string(), {.seq = 32, .documents = true});
  const auto batch = packed->batch({0});
  ASSERT_TRUE(batch.documents.defined());
  EXPECT_EQ(batch.documents.max().item<int64_t>(), 1);
  EXPECT_EQ(batch.num_ignored, 1);
  const models::GptOptions gpt{.layers = 2, .dim = 16, .heads = 2, .vocab = 256, .seq = 32};
  const models::LlamaOptions llama{
      .layers = 2, .dim = 16, .heads = 4, .vocab = 256, .seq = 32, .kv_heads = 2};
  for (const Architecture& architecture : std::vector<Architecture>{gpt, llama}) {
    const models::Whole model(architecture, at::kCPU);
    at::Tensor together, plain = model.forward(batch.input);
    {
      const parallel::Passing::Scope scope({.documents = batch.documents});
      together = model.forward(batch.input);
    }
    const int64_t first = (batch.documents[0] == 0).sum().item<int64_t>();
    EXPECT_EQ(first, 15);  // and what ends it
    const at::Tensor one = model.forward(batch.input.narrow(1, 0, first)),
                     two = model.forward(batch.input.narrow(1, first, 32 - first));
    EXPECT_LT((together - at::cat({one, two}, 1)).abs().max().item<double>(), 1e-5);
    EXPECT_GT((plain - together).abs().max().item<double>(), 1e-3);
    for (const std::string plan : {"dp=2", "pp=2 micro=2", "tp=2 sequence=yes"}) {
      TrainerOptions options{.plan = plan::parse_plan(plan), .steps = 2, .batch = 4};
      std::vector<double> losses;
      for (const auto& text : {std::string("micro=1"), plan}) {
        options.plan = plan::parse_plan(text);
        Trainer trainer(models::make_model(architecture), packed, options);
        trainer.callbacks.on_step = [&](const Step& step) { losses.push_back(step.loss); };
        comm::run_ranks(options.plan.num_ranks(),
                        [&](comm::Communicator& world) { trainer.fit(world); },
                        {.threads_per_rank = 1});
      }
      ASSERT_EQ(losses.size(), 4u);
      EXPECT_NEAR(losses[2], losses[0], 1e-5) << plan;
      EXPECT_NEAR(losses[3], losses[1], 1e-4) << plan;
    }
  }
}

// What was trained is used in one piece: norms with what they have learned, and by its own name.
TEST_F(Architectures, AreLoadedFromACheckpoint) {
  const models::ResnetOptions resnet{.width = 4, .channels = 2, .size = 8, .classes = 3};
  const auto pictures = data::part_of(data::synthetic_images(2, 8, 3, 5), 0, 120);
  const auto losses = train(resnet, pictures, "dp=2 zero=3", folder_ / "checkpoints");
  const auto loaded = models::open_loadable(folder_);
  ASSERT_EQ(loaded->inputs().size(), 1u);
  EXPECT_EQ(loaded->inputs()[0].text(), "image:FP32[-1,2,-1,-1]");
  EXPECT_EQ(loaded->outputs()[0].text(), "logits:FP32[-1,3]");
  std::vector<int64_t> kept;
  for (int64_t i = 96; i < 120; ++i) kept.push_back(i);
  const auto batch = pictures->batch(kept);
  const at::Tensor logits = loaded->run({batch.input})[0];
  const double loss = at::cross_entropy_loss(logits, batch.target).item<double>();
  EXPECT_NEAR(loss, losses[4], 1e-5);
  EXPECT_THROW(loaded->run({batch.input.to(at::kDouble)}), Error);
  EXPECT_THROW(loaded->run({batch.input, batch.input}), Error);
  EXPECT_THROW(loaded->run({batch.input.narrow(1, 0, 1)}), Error);
}

TEST_F(Architectures, FilesOfOthersAreOpenedByWhatTheyAre) {
  const auto path =
      script("def forward(self, x, y):\n    return torch.linear(x, self.first) + y\n");
  const auto plain = models::open_loadable(path);
  EXPECT_FALSE(plain->declared());
  EXPECT_EQ(plain->inputs()[1].name, "y");
  const at::Tensor x = at::ones({2, 6}, at::kDouble), y = at::ones({2, 8}, at::kDouble);
  EXPECT_EQ(plain->run({x, y})[0].size(1), 8);
  const auto told = models::open_loadable(
      path, {.inputs = {models::parse_port("y:FP64[-1,8]"), models::parse_port("x:FP64[-1,6]")}});
  EXPECT_EQ(told->inputs()[0].name, "x");
  EXPECT_EQ(told->run({x, y})[0].size(0), 2);
  expect_part(refusal_of([&] { told->run({y, y}); }), "input 'x' wants FP64[-1,6], got FP64[2,8]");
  expect_part(refusal_of([&] {
                models::open_loadable(path, {.inputs = {models::parse_port("z:FP32[1]")}});
              }),
              "takes 'x', which no input was declared for");
  expect_part(refusal_of([] { models::parse_port("x:FP31[2]"); }), "there is no type 'FP31'");
  expect_part(refusal_of([] { models::parse_port("x:FP32[2,-3]"); }), "'-3' is no size");
  std::ofstream(folder_ / "text.pt") << "hello";
  expect_part(refusal_of([&] { models::open_loadable(folder_ / "text.pt"); }),
              "is neither .pt nor .pt2");
  expect_part(refusal_of([&] { models::open_loadable(folder_ / "none.pt"); }), "there is no");
  expect_part(refusal_of([&] { models::open_loadable(folder_); }), "is no checkpoint");
}

TEST_F(Architectures, WhatACannotIsSaidWithWhatItCan) {
  const auto refusal = [](const std::vector<std::string>& words) {
    return refusal_of([&] {
      auto config = parse_config("", "x", words);
      settle(config);
      resolve(config, 2);
      open_data(config);
    });
  };
  expect_part(refusal({"model.arch=resnet", "data.kind=synthetic", "plan=tensor"}),
              "a resnet trains under plan=data, zero1, zero2, zero3, pipeline and layer");
  expect_part(refusal({"model.arch=resnet", "model.layers=20", "data.kind=synthetic"}),
              "18, 34 or 50 layers, got 20");
  const std::string path = "model.path=" + script("def forward(self, x):\n    return x\n");
  expect_part(refusal({"model.arch=torchscript", path, "data.kind=synthetic", "plan=pipeline"}),
              "a TorchScript module is one layer; it trains under plan=data, zero1, zero2, zero3");
  expect_part(refusal({"model.arch=torchscript", path, "data.kind=synthetic", "plan=tensor"}),
              "trains under plan=data, zero1, zero2, zero3");
  expect_part(refusal({"model.arch=torchscript", "data.kind=synthetic"}),
              "model.path: give the file");
  expect_part(refusal({"model.arch=vit", "data.kind=text"}),
              "a vit takes images or synthetic, not text");
  expect_part(refusal({"model.arch=gpt", "data.kind=images", "data.path=x"}), "there is no 'x'");
  expect_part(refusal({"model.arch=vit", "model.size=8", "model.patch=3", "data.kind=synthetic"}),
              "a patch that divides size");
}

}  // namespace yoke::train
