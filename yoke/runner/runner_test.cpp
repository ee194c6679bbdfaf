// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/saver.h"
#include "yoke/comm/local/cuda_lane.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/models/architecture.h"
#include "yoke/models/generate.h"
#include "yoke/runner/model_runner.h"
#include "yoke/runner/open_runner.h"
#include "yoke/serve/request.h"

namespace yoke::runner {
namespace {

namespace fs = std::filesystem;
using plan::Type;
using serve::ReplicaSpec;
using serve::Runner;

// Outputs in memory of their own, as tensors.
struct Kept final : serve::Outputs {
  std::span<std::byte> add(Type type, const plan::Shape& shape, size_t bytes) override {
    types.push_back(type);
    if (type == Type::Bytes) {
      strings.resize(bytes);
      return std::as_writable_bytes(std::span(strings));
    }
    tensors.push_back(at::empty(shape, models::dtype_of(type)));
    return {static_cast<std::byte*>(tensors.back().mutable_data_ptr()), tensors.back().nbytes()};
  }
  std::vector<Type> types = {};
  std::vector<at::Tensor> tensors = {};
  std::string strings = {};
};

serve::Call call_with(const std::vector<at::Tensor>& inputs, const std::string& sequence = "",
                      bool start = false, bool end = false) {
  serve::Call call{.sequence = sequence, .sequence_start = start, .sequence_end = end};
  for (const auto& input : inputs)
    call.inputs.push_back({.type = models::type_of(input.scalar_type()),
                           .shape = input.sizes().vec(),
                           .data = static_cast<std::byte*>(input.mutable_data_ptr()),
                           .bytes = input.nbytes()});
  return call;
}

std::vector<at::Tensor> run(Runner& runner, const std::vector<at::Tensor>& inputs) {
  Kept kept;
  runner.run(call_with(inputs), kept);
  return kept.tensors;
}

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

std::string notes(const Runner& runner) { return join(runner.facts().notes, "\n"); }

at::Tensor numbers(const std::vector<int64_t>& sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes).sin();
}

class Runners : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  // A module with two tensors of its own, and such a forward.
  std::string script(const std::string& forward) const {
    torch::jit::Module module("m");
    module.register_parameter("weight", numbers({3, 6}), false);
    module.register_buffer("seen", at::zeros({1}));
    module.register_attribute("training", c10::BoolType::get(), true);
    module.register_attribute("last", c10::TensorType::get(), at::zeros({1}));
    module.define(forward);
    const auto path = (folder_ / "module.pt").string();
    module.save(path);
    return path;
  }
  ReplicaSpec spec(const std::string& body, std::vector<std::string> inputs = {"x:FP32[-1,6]"},
                   const std::string& arguments = "x") const {
    return {.path = script(cat("def forward(self, ", arguments, "):\n    ", body, "\n")),
            .inputs = std::move(inputs)};
  }
  // A folder with a small model of words, whose words are bytes.
  std::string words() const {
    const models::WordsOptions options =
        models::GptOptions{.layers = 2, .dim = 16, .heads = 2, .vocab = 256, .seq = 32};
    std::vector<parallel::Layer> layers;
    for (const auto& make : models::make_words(options).layers({})) layers.push_back(make());
    models::write_hugging_face(folder_ / "words", options, [&](const std::string& name) {
      const auto key = name.substr(name.find('.') + 1);
      return layers[std::stoul(name)].module->named_parameters()[key].detach();
    });
    return (folder_ / "words").string();
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / cat("yoke_runner_", ::getpid());
};

}  // namespace

TEST_F(Runners, StandInsAreTheServersOwn) {
  const auto runner = open_runner({.path = "stand-in:ms=0"});
  EXPECT_EQ(runner->facts().platform, "yoke_stand_in");
  EXPECT_TRUE(run(*runner, {at::ones({2, 4})})[0].equal(at::full({2, 4}, 2.f)));
}

TEST_F(Runners, DeclaredInputsAreBatchedAndItsOutputsKnown) {
  const auto runner = open_runner(spec("return torch.linear(x, self.weight)"));
  const auto& facts = runner->facts();
  EXPECT_EQ(facts.platform, "pytorch_torchscript");
  EXPECT_TRUE(facts.declared && facts.pure && !facts.pads);
  EXPECT_EQ(facts.batch, 32);
  EXPECT_EQ(facts.buckets, (std::vector<int64_t>{1, 2, 4, 8, 16, 32}));
  EXPECT_EQ(facts.outputs[0].text(), "y:FP32[-1,3]");
  EXPECT_EQ(facts.bytes, 19 * sizeof(float));
  EXPECT_TRUE(facts.notes.empty()) << notes(*runner);
  EXPECT_GT(facts.longest_s, 0);
  const at::Tensor x = numbers({5, 6});
  EXPECT_TRUE(run(*runner, {x})[0].equal(at::linear(x, numbers({3, 6}))));
}

TEST_F(Runners, WithoutDeclaredInputsRequestsAreTakenAsTheyAre) {
  const auto runner = open_runner(spec("return x + 1", {}));
  EXPECT_FALSE(runner->facts().declared);
  EXPECT_EQ(runner->facts().batch, 0);
  EXPECT_EQ(runner->facts().inputs[0].name, "x");
  EXPECT_TRUE(runner->facts().outputs.empty());
  expect_part(notes(*runner), "--input 'x:FP32[-1,3,224,224]'");
  EXPECT_TRUE(run(*runner, {at::ones({2, 2, 2})})[0].equal(at::full({2, 2, 2}, 2.f)));
}

TEST_F(Runners, EveryTypeComesBackAsItWent) {
  for (int number = 0; number < int(Type::Bytes); ++number) {
    const Type type{uint8_t(number)};
    const auto port = cat("x:", plan::type_name(type), "[-1,2]");
    const auto runner = open_runner(spec("return x", {port}));
    const at::Tensor x = at::tensor({0, 1, 1, 0, 1, 1}).view({3, 2}).to(models::dtype_of(type));
    EXPECT_TRUE(run(*runner, {x})[0].equal(x)) << port;
    EXPECT_EQ(runner->facts().outputs[0].text(), "y:" + port.substr(2));
    EXPECT_EQ(runner->facts().batch, 32) << notes(*runner);
  }
}

TEST_F(Runners, OutputsOfManyHaveNames) {
  const std::vector<std::string> inputs{"x:FP32[-1,6]"};
  const auto pair = open_runner(spec("return x, x.sum(1)", inputs));
  EXPECT_EQ(pair->facts().outputs[0].text(), "output0:FP32[-1,6]");
  EXPECT_EQ(pair->facts().outputs[1].text(), "output1:FP32[-1]");
  const auto list = open_runner(spec("return [x, x * 2]", inputs));
  EXPECT_TRUE(run(*list, {at::ones({1, 6})})[1].equal(at::full({1, 6}, 2.f)));
  auto keyed = spec("return {'b': x, 'a': x.long()}", inputs);
  const auto dictionary = open_runner(keyed);
  EXPECT_EQ(dictionary->facts().outputs[0].name, "b");
  EXPECT_EQ(dictionary->facts().outputs[1].text(), "a:INT64[-1,6]");
  keyed.outputs = {"a:INT64[-1,6]"};
  const auto one = run(*open_runner(keyed), {at::ones({2, 6})});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].scalar_type(), at::kLong);
  keyed.outputs = {"c:INT64[-1,6]"};
  expect_part(notes(*open_runner(keyed)), "gave no 'c'");
  keyed.outputs = {"a:FP32[-1,6]"};
  expect_part(refusal_of([&] { open_runner(keyed); }),
              "output 'a' was declared as FP32[-1,6], and is INT64[1,6]");
}

TEST_F(Runners, StringsOfAnyBytesPass) {
  const auto runner = open_runner({.path = script("def forward(self, text: List[str]):\n"
                                                  "    return [word + '!' for word in text]\n"),
                                   .inputs = {"text:BYTES[-1]"},
                                   .outputs = {"loud:BYTES[-1]"}});
  EXPECT_EQ(runner->facts().batch, 0);
  std::string data("\3\0\0\0a\0\xff\0\0\0\0", 11);
  Kept kept;
  runner->run({.inputs = {{.type = Type::Bytes,
                           .shape = {2},
                           .data = reinterpret_cast<std::byte*>(data.data()),
                           .bytes = data.size()}}},
              kept);
  EXPECT_EQ(kept.strings, std::string("\4\0\0\0a\0\xff!\1\0\0\0!", 13));
  EXPECT_EQ(kept.types, std::vector{Type::Bytes});
  expect_part(refusal_of([&] { open_runner(spec("return x", {"x:BYTES[-1]"})); }),
              "BYTES is List[str]");
}

TEST_F(Runners, AnArgumentThatIsANumberTakesTheOneElement) {
  const auto runner =
      open_runner(spec("return x * n", {"x:FP32[-1,6]", "n:INT64[1]"}, "x, n: int"));
  EXPECT_EQ(runner->facts().batch, 0);
  expect_part(notes(*runner), "'n' is INT64[1]");
  EXPECT_TRUE(run(*runner, {at::ones({2, 6}), at::full({1}, 3)})[0].equal(at::full({2, 6}, 3.f)));
  const auto plain = open_runner(spec("return x * n", {}, "x, n: int"));
  expect_part(refusal_of([&] {
                run(*plain, {at::ones({2, 6}), at::ones({2}, at::kLong)});
              }),
              "wanted one element, got 2");
}

TEST_F(Runners, RowsThatDependOnTheirNeighboursAreServedAlone) {
  for (const char* body : {"return x - x.mean(0)", "return x.cumsum(0)", "return x / len(x)"}) {
    const auto runner = open_runner(spec(body));
    EXPECT_FALSE(runner->facts().pure) << body;
    EXPECT_EQ(runner->facts().batch, 1) << body;
    EXPECT_EQ(runner->facts().buckets, std::vector<int64_t>{1}) << body;
    expect_part(notes(*runner), "rows depend on their neighbours");
  }
  for (const char* body : {"return torch.softmax(x, 1)", "return x * float('nan')",
                           "return x / torch.zeros([1])", "return x.flip([1])"}) {
    const auto runner = open_runner(spec(body));
    EXPECT_TRUE(runner->facts().pure) << body << ": " << notes(*runner);
    EXPECT_EQ(runner->facts().batch, 32) << body;
  }
}

TEST_F(Runners, ARowThatDependsOnThoseAfterItIsServedAlone) {
  for (const char* body : {"y = x.clone()\n    y[0] = x.mean(0)\n    return y",
                           "return x.flip([0]).cumsum(0).flip([0])"})
    for (const int64_t batch : {2, 32}) {
      auto leaks = spec(body);
      leaks.batch = batch;
      const auto runner = open_runner(leaks);
      EXPECT_FALSE(runner->facts().pure) << body << " in batches of " << batch;
      EXPECT_EQ(runner->facts().batch, 1) << body;
      expect_part(notes(*runner), "rows depend on their neighbours");
    }
}

TEST_F(Runners, StateBetweenCallsIsFound) {
  for (const char* body : {"self.last = self.last + x.sum()\n    return x + self.last",
                           "self.seen.add_(1)\n    return x + self.seen",
                           "self.seen.add_(1)\n    return x", "return x + torch.rand([1])"}) {
    const auto runner = open_runner(spec(body));
    EXPECT_FALSE(runner->facts().pure) << body;
    EXPECT_EQ(runner->facts().batch, 1) << body;
    expect_part(notes(*runner), "keeps state between calls");
    expect_part(notes(*runner), "stateful = true");
  }
  // What its own values do not make it write, others may.
  const auto rare =
      open_runner(spec("if bool(x.sum() > 1e6):\n      self.seen.add_(1)\n    return x"));
  EXPECT_FALSE(rare->facts().pure);
  EXPECT_EQ(rare->facts().batch, 1);
  expect_part(notes(*rare), "forward() sets its own attributes, or writes into them");
  // Not tried, but written there.
  const auto unknown = open_runner(spec("self.last = x\n    return x", {}));
  EXPECT_FALSE(unknown->facts().pure);
  // What it was tried with left nothing behind.
  const auto counts = open_runner(spec("self.seen.add_(1)\n    return x + self.seen"));
  EXPECT_TRUE(run(*counts, {at::zeros({1, 6})})[0].equal(at::ones({1, 6})));
}

TEST_F(Runners, TheStateOfACheckpointOfTorchScriptIsFoundAsThatOfItsFile) {
  const std::string body = "self.seen.add_(1)\n    return torch.linear(x, self.weight) + self.seen";
  const auto checkpoint = folder_ / "checkpoints";
  const auto has = [](const std::string& name, const at::Tensor& value) {
    const auto sizes = value.sizes().vec();
    return checkpoint::Piece{name, sizes, plan::whole_box(sizes), value};
  };
  comm::run_ranks(1, [&](comm::Communicator& comm) {
    checkpoint::Saver saver(checkpoint, comm);
    const models::ScriptOptions module{.path = spec(body).path};
    saver.save(1, {{has("model/0.weight", at::ones({3, 6})), has("model/0.seen", at::zeros({1}))},
                   {{"architecture", models::to_json(module)}}});
  });
  ReplicaSpec saved{.path = checkpoint, .inputs = {"x:FP32[-1,6]"}};
  const at::Tensor x = at::ones({1, 6});
  const auto declared = open_runner(saved);
  EXPECT_EQ(declared->facts().batch, 1);
  EXPECT_FALSE(declared->facts().pure);
  expect_part(notes(*declared), "keeps state between calls");
  EXPECT_TRUE(run(*declared, {x})[0].equal(at::full({1, 3}, 7.f))) << "by its trial it has none";
  saved.stateful = true;
  EXPECT_TRUE(open_runner(saved)->facts().stateful);
  const auto plain = open_runner({.path = checkpoint});
  EXPECT_FALSE(plain->facts().pure) << "it would be tried again";
  expect_part(notes(*plain), "forward() sets its own attributes, or writes into them");
  expect_part(join(inspect(checkpoint).notes, "\n"), "stateful = true");
}

TEST_F(Runners, ASequenceHasAnInstanceOfItsOwn) {
  auto stateful = spec(
      "self.seen.add_(x.sum())\n    self.last = self.last + 1\n"
      "    return x * 0 + self.seen + 100 * self.last");
  stateful.stateful = true;
  const auto runner = open_runner(stateful);
  EXPECT_TRUE(runner->facts().stateful);
  EXPECT_EQ(runner->facts().batch, 0);
  const auto next = [&](const char* sequence, bool start, bool end = false) {
    Kept kept;
    runner->run(call_with({at::ones({1, 1}).expand({1, 6}).contiguous()}, sequence, start, end),
                kept);
    return kept.tensors[0][0][0].item<float>();
  };
  EXPECT_EQ(next("a", true), 106);
  EXPECT_EQ(next("b", true), 106);
  EXPECT_EQ(next("a", false), 212);
  EXPECT_EQ(next("a", true), 106);
  EXPECT_EQ(next("b", false, true), 212);
  expect_part(refusal_of([&] { next("b", false); }), "there is no such sequence");
  for (size_t i = 0; i < kMaxSequences; ++i) next(cat("many", i).c_str(), true);
  expect_part(refusal_of([&] { next("a", false); }), "there is no such sequence");
  EXPECT_EQ(next("many0", false), 212);
}

TEST_F(Runners, WhatASequenceKeepsIsNotOverwrittenByOthers) {
  auto stateful = spec("y = self.last + x * 0\n    self.last = x\n    return y");
  stateful.stateful = true;
  const auto runner = open_runner(stateful);
  const at::Tensor slab = at::ones({1, 6});
  const auto next = [&](const char* sequence, bool start, float value) {
    slab.fill_(value);
    Kept kept;
    runner->run(call_with({slab}, sequence, start), kept);
    return kept.tensors[0][0][0].item<float>();
  };
  next("a", true, 7);
  next("b", true, 8);
  EXPECT_EQ(next("a", false, 9), 7);
}

TEST_F(Runners, WhatIsWrittenInPlaceIsState) {
  for (const char* body : {"self.seen.add_(1)\n    return x", "self.seen[0] = 1.0\n    return x",
                           "y = self.seen\n    y.copy_(x.sum())\n    return y"})
    EXPECT_FALSE(open_runner(spec(body, {}))->facts().pure) << body;
  for (const char* body : {"y = x + self.seen\n    y.add_(1)\n    return y",
                           "if self.training:\n      self.seen.add_(1)\n    return x + self.seen",
                           "return torch.relu_(torch.linear(x, self.weight))"})
    EXPECT_TRUE(open_runner(spec(body, {}))->facts().pure) << body;
}

TEST_F(Runners, AnErrorEndsItsSequence) {
  auto stateful =
      spec("self.seen.add_(1)\n    assert bool(x[0, 0] > 0), 'too small'\n    return x");
  stateful.stateful = true;
  const auto runner = open_runner(stateful);
  Kept kept;
  runner->run(call_with({at::ones({1, 6})}, "a", true), kept);
  EXPECT_ANY_THROW(runner->run(call_with({-at::ones({1, 6})}, "a"), kept));
  EXPECT_ANY_THROW(runner->run(call_with({at::ones({1, 6})}, "a"), kept));
}

TEST_F(Runners, ComputesInALowerPrecisionAndSaysHowFarOffThatIs) {
  for (const char* precision : {"bf16", "fp16"}) {
    auto lower = spec("return torch.linear(x, self.weight), x.argmax(1)");
    lower.precision = precision;
    const auto runner = open_runner(lower);
    EXPECT_EQ(runner->facts().outputs[0].text(), "output0:FP32[-1,3]");
    EXPECT_EQ(runner->facts().outputs[1].text(), "output1:INT64[-1]");
    EXPECT_GT(runner->facts().difference, 0);
    EXPECT_LT(runner->facts().difference, 0.1);
    EXPECT_EQ(runner->facts().bytes, 19 * 2u);
    EXPECT_TRUE(runner->facts().pure) << notes(*runner);
    const at::Tensor x = numbers({5, 6}), exact = at::linear(x, numbers({3, 6}));
    const auto got = run(*runner, {x});
    EXPECT_TRUE(at::allclose(got[0], exact, 0, 0.05));
    EXPECT_FALSE(got[0].equal(exact));
  }
  auto unknown = spec("return x", {});
  unknown.precision = "bf16";
  expect_part(notes(*open_runner(unknown)), "how far bf16 is from fp32 was not measured");
  auto bad = spec("return x");
  bad.precision = "fp8";
  expect_part(refusal_of([&] { open_runner(bad); }), "wanted fp32, bf16 or fp16");
}

TEST_F(Runners, BatchesAreAsLargeAsTheyMayBe) {
  auto six = spec("return x");
  six.batch = 6;
  EXPECT_EQ(open_runner(six)->facts().buckets, (std::vector<int64_t>{1, 2, 4, 6}));
  EXPECT_EQ(open_runner(spec("return x", {"x:FP32[1..20,6]"}))->facts().batch, 20);
  auto large = spec("return x", {"x:FP32[1..4,6]"});
  large.batch = 6;
  expect_part(refusal_of([&] { open_runner(large); }), "batch is 6");
  const auto limited = open_runner(spec("assert len(x) < 5, 'too many'\n    return x"));
  EXPECT_EQ(limited->facts().batch, 4);
  expect_part(notes(*limited), "too many");
  const auto whole = open_runner(spec("return x.sum()"));
  EXPECT_EQ(whole->facts().batch, 0);
  expect_part(notes(*whole), "do not have a row");
  EXPECT_EQ(open_runner(spec("return x", {"x:FP32[4,6]"}))->facts().batch, 0);
}

TEST_F(Runners, AModelThatWantsSeveralRowsGetsThemHoweverFewThereAre) {
  const std::vector<std::string> inputs{"x:FP32[3..64,6]"};
  const auto runner = open_runner(spec("assert len(x) > 2, 'too few'\n    return x * 2", inputs));
  EXPECT_EQ(runner->facts().batch, 32) << notes(*runner);
  EXPECT_EQ(runner->facts().buckets, (std::vector<int64_t>{3, 6, 12, 24, 32}));
  EXPECT_TRUE(runner->facts().pure && !runner->facts().pads);
  EXPECT_EQ(notes(*runner), "");
  for (const int64_t rows : {1, 2, 3, 4}) {  // the rest of a request, or half of a batch
    const at::Tensor x = numbers({rows, 6});
    EXPECT_TRUE(run(*runner, {x})[0].equal(x * 2)) << rows;
  }
  EXPECT_EQ(open_runner(spec("return x", {"x:FP32[40..64,6]"}))->facts().batch, 40);
  const auto mixes = open_runner(spec("return x - x.mean(0)", inputs));
  EXPECT_EQ(mixes->facts().batch, 0) << "a request is not to be filled up";
  EXPECT_FALSE(mixes->facts().pure);
  expect_part(notes(*mixes), "each request is served alone: rows depend on their neighbours");
}

class RunnersGpu : public Runners {
 protected:
  void SetUp() override {
    if (!comm::cuda_available()) GTEST_SKIP() << "no GPU, or a build without CUDA";
    Runners::SetUp();
  }
};

TEST_F(RunnersGpu, WhatIsRecordedGivesWhatTheModelGives) {
  auto recorded = spec("return torch.relu(torch.linear(x, self.weight)) + 1, x.argmax(1)");
  recorded.device = "cuda:0";
  recorded.batch = 6;
  for (const char* precision : {"fp32", "bf16"}) {
    recorded.precision = precision;
    const auto runner = open_runner(recorded);
    EXPECT_EQ(notes(*runner), "");
    auto one_by_one = recorded;
    one_by_one.record = false;
    const auto plain = open_runner(one_by_one);
    for (const int64_t rows : {1, 5, 2, 6, 5}) {
      const at::Tensor x = numbers({rows, 6}) * rows;
      const auto got = run(*runner, {x}), wanted = run(*plain, {x});
      ASSERT_EQ(got.size(), 2u);
      EXPECT_TRUE(at::allclose(got[0], wanted[0], 1e-2, 1e-2)) << rows << " rows, " << precision;
      EXPECT_TRUE(got[1].equal(wanted[1]));
    }
  }
}

// Both go on as before, and so does the next model.
TEST_F(RunnersGpu, WhatWaitsForTheGpuIsNotRecorded) {
  auto waits =
      spec("y = x.sum(1)\n    if bool(self.weight.sum() > 100):\n      y = y + 1\n    return y");
  waits.device = "cuda:0";
  const auto runner = open_runner(waits);
  expect_part(notes(*runner), "its kernels are sent to the GPU one by one: ");
  const at::Tensor x = numbers({3, 6});
  EXPECT_TRUE(at::allclose(run(*runner, {x})[0], x.sum(1), 1e-3, 1e-3));
  auto next = spec("return x * 2");
  next.device = "cuda:0";
  const auto after = open_runner(next);
  EXPECT_EQ(notes(*after), "");
  EXPECT_TRUE(run(*after, {x})[0].equal(x * 2));
  EXPECT_TRUE(at::allclose(run(*runner, {x})[0], x.sum(1), 1e-3, 1e-3));
}

TEST_F(Runners, FilledBatchesAreCutBack) {
  Lane lane(at::kCPU);
  const at::Tensor x = numbers({3, 2});
  const at::Tensor filled = lane.there(0, x, 5);
  EXPECT_TRUE(filled.narrow(0, 0, 3).equal(x));
  EXPECT_TRUE(filled[4].equal(x[0]));
  EXPECT_EQ(lane.there(0, x, 3).const_data_ptr(), x.const_data_ptr());
}

TEST_F(Runners, AModelThatThrowsSaysWhatItThrew) {
  const auto runner = open_runner(
      spec("assert bool((x[:, 0] > -9).all()), 'a row is too small'\n    return x * 2"));
  EXPECT_EQ(runner->facts().batch, 32);
  const auto text = refusal_of([&] { run(*runner, {at::full({2, 6}, -10.f)}); });
  expect_part(text, "a row is too small");
  EXPECT_EQ(text.find("Traceback"), text.npos) << text;
  EXPECT_TRUE(run(*runner, {at::ones({1, 6})})[0].equal(at::full({1, 6}, 2.f)));
  // Nothing that can be tried goes well.
  const auto never = open_runner(spec("assert bool(x[0, 0] > 50), 'small'\n    return x"));
  EXPECT_EQ(never->facts().batch, 1);
  EXPECT_FALSE(never->facts().pure);
  expect_part(notes(*never), "could not be tried");
  // Whole numbers that are places in a table.
  const auto table = open_runner(spec("return self.weight[i]", {"i:INT64[-1]"}, "i"));
  EXPECT_EQ(table->facts().batch, 32);
  EXPECT_TRUE(table->facts().pure) << notes(*table);
}

TEST_F(Runners, WhatIsWrittenIntoInputsStaysInACopy) {
  const auto runner = open_runner(spec("x.add_(1)\n    return x * 1"));
  const at::Tensor x = at::zeros({2, 6});
  EXPECT_TRUE(run(*runner, {x})[0].equal(at::ones({2, 6})));
  EXPECT_TRUE(x.equal(at::zeros({2, 6})));
}

TEST_F(Runners, OutputsThatAreViewsArriveInOrder) {
  const auto runner = open_runner(spec("return x.flip([1]).t().t(), x[:, ::2]"));
  const at::Tensor x = numbers({3, 6});
  EXPECT_TRUE(run(*runner, {x})[0].equal(x.flip({1})));
  EXPECT_TRUE(run(*runner, {x})[1].equal(x.slice(1, 0, 6, 2)));
}

TEST_F(Runners, APromptGoesOnAsGenerateDoes) {
  const auto folder = words();
  const auto runner = open_runner({.path = folder, .tokenizer = "bytes"});
  EXPECT_EQ(runner->facts().platform, "yoke");
  EXPECT_TRUE(runner->facts().has_words);
  EXPECT_TRUE(runner->facts().pure) << notes(*runner);
  EXPECT_EQ(runner->facts().inputs[0].text(), "tokens:INT64[-1,1..32]");
  const models::Whole model(models::open_model(folder).architecture, at::kCPU);
  const auto opened = models::open_model(folder);
  for (const double temperature : {0.0, 1.0}) {
    const serve::Prompt prompt{.text = "to", .tokens = 12, .temperature = temperature, .seed = 3};
    std::string got, expected;
    runner->generate(prompt.text, to_json(prompt), [&](std::string_view more) {
      got += more;
      return true;
    });
    const auto tokens = models::generate(
        model, {'t', 'o'}, {.tokens = 12, .sampling = {.temperature = temperature, .seed = 3}});
    expected = data::byte_tokenizer()->decode(tokens);
    EXPECT_EQ(got, expected);
    int pieces = 0;
    runner->generate(prompt.text, to_json(prompt), [&](std::string_view) { return ++pieces < 3; });
    EXPECT_LE(pieces, 4);
  }
  const at::Tensor tokens = at::arange(6, at::kLong).view({2, 3});
  EXPECT_TRUE(at::allclose(run(*runner, {tokens})[0], model.forward(tokens), 1e-4, 1e-5));
  const auto silent = open_runner({.path = folder});
  EXPECT_FALSE(silent->facts().has_words);
  expect_part(notes(*silent), "it takes no prompts");
}

TEST_F(Runners, InspectTellsWhatTheFileSays) {
  const auto script = inspect(spec("self.last = x\n    return x").path);
  EXPECT_EQ(script.inputs[0].name, "x");
  EXPECT_FALSE(script.declared);
  EXPECT_EQ(script.bytes, 19 * sizeof(float));
  expect_part(join(script.notes, "\n"), "stateful = true");
  const auto folder = inspect(words());
  EXPECT_EQ(folder.inputs[0].text(), "tokens:INT64[-1,-1]");
  EXPECT_EQ(folder.outputs[0].text(), "logits:FP32[-1,-1,256]");
}

TEST_F(Runners, OtherFilesAreRefused) {
  expect_part(refusal_of([&] { open_runner({.path = (folder_ / "none.pt").string()}); }),
              "there is no");
  std::ofstream(folder_ / "text.pt") << "hello";
  expect_part(refusal_of([&] { open_runner({.path = (folder_ / "text.pt").string()}); }),
              "is neither .pt nor .pt2");
  expect_part(refusal_of([&] { open_runner(spec("return x", {"z:FP32[-1]"})); }),
              "which no input was declared for");
}

// What tests/packages_test.sh wrote. They check their inputs though nobody has told them to.
TEST(Packages, RunWithBatchesOfAnySize) {
  const char* given = std::getenv("YOKE_TEST_PACKAGES");
  if (given == nullptr) GTEST_SKIP() << "tests/packages_test.sh runs it";
  ::unsetenv("AOTI_RUNTIME_CHECK_INPUTS");
  const fs::path folder = given;
  const ReplicaSpec compiled{.path = folder / "compiled.pt2", .inputs = {"x:FP32[-1,6]"}};
  const auto runner = open_runner(compiled);
  const auto& facts = runner->facts();
  EXPECT_EQ(facts.platform, "torch_aoti");
  EXPECT_TRUE(facts.pads && facts.pure) << notes(*runner);
  EXPECT_EQ(facts.buckets, (std::vector<int64_t>{2, 4, 8, 16, 32}));
  EXPECT_EQ(facts.outputs[0].text(), "y:FP32[-1,3]");
  const auto script = open_runner({.path = folder / "script.pt", .inputs = {"x:FP32[-1,6]"}});
  for (const int64_t rows : {1, 2, 5, 32}) {
    const at::Tensor x = numbers({rows, 6}), got = run(*runner, {x})[0];
    EXPECT_EQ(got.size(0), rows);
    EXPECT_TRUE(at::allclose(got, run(*script, {x})[0], 1e-5, 1e-6)) << rows;
  }
  const auto ranged = open_runner({.path = folder / "compiled.pt2", .inputs = {"x:FP32[2..64,6]"}});
  EXPECT_EQ(ranged->facts().batch, 32) << notes(*ranged);
  EXPECT_THROW(run(*runner, {numbers({2, 4})}), Error);
  EXPECT_THROW(run(*runner, {numbers({2, 6}).to(at::kDouble)}), Error);
  const auto with = [&](auto change) {
    ReplicaSpec spec = compiled;
    change(spec);
    return refusal_of([&] { open_runner(spec); });
  };
  expect_part(with([](auto& spec) { spec.inputs = {}; }), "declare them");
  expect_part(with([](auto& spec) { spec.inputs = {"x:FP32[-1,4]"}; }),
              "throws at what was declared");
  expect_part(with([](auto& spec) { spec.batch = 100; }), "set batch = 64");
  expect_part(with([](auto& spec) { spec.stateful = true; }), "TorchScript alone");
  expect_part(with([](auto& spec) { spec.precision = "bf16"; }), "its precision with it");
  EXPECT_EQ(inspect(compiled.path).platform, "torch_aoti");
  expect_part(join(inspect(compiled.path).notes, "\n"), "AOTI_DEVICE_KEY cpu");
}

TEST_F(Runners, AFlowThatDecidesForABatchServesEachRowAlone) {
  fs::create_directories(folder_ / "gated");
  std::ofstream(folder_ / "gated/flow.toml") << R"([[input]]
port = "x:FP32[b,2]"
to = ["gate", "less", "more"]
[[node]]
name = "gate"
model = "above:than=10"
[[node]]
name = "less"
model = "scale:by=1"
[[node]]
name = "more"
model = "scale:by=-1"
[[branch]]
name = "which"
when = "gate"
then = ["more"]
then_gives = "more"
else = ["less"]
else_gives = "less"
[[output]]
port = "y:FP32[b,2]"
from = "which"
)";
  const auto runner = open_runner({.path = (folder_ / "gated").string()});
  EXPECT_EQ(runner->facts().batch, 1) << "values of its own are all below";
  EXPECT_FALSE(runner->facts().pure);
  expect_part(notes(*runner), "'which' of the flow decides for all rows of a batch");
  EXPECT_TRUE(run(*runner, {at::full({1, 2}, 50.f)})[0].equal(at::full({1, 2}, -50.f)));
}

// A replica of a flow is its set of devices; the next one has the GPUs after them.
TEST(FlowModel, ReplicasTakeTheGpusAfterEachOther) {
  const fs::path folder = fs::temp_directory_path() / cat("yoke-flow-model-", ::getpid());
  fs::create_directories(folder);
  std::ofstream(folder / "flow.toml") << "[flow]\ndevices = \"cuda:0-1\"\n[[node]]\n"
                                         "name = \"a\"\nmodel = \"same\"\n";
  topo::Host host;
  host.gpus.resize(3);
  try {
    const FlowModel second(folder.string(), {.replica = 1}, host);
    ADD_FAILURE() << "there is no fourth GPU";
  } catch (const Error& error) {
    expect_part(error.what(), "replica 1 of a flow on cuda:0-1 wants cuda:3, and there are 3 GPUs");
  }
  fs::remove_all(folder);
}

}  // namespace yoke::runner
