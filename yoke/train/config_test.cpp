// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/config.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::train {
namespace {

Config parse(const std::string& toml, std::vector<std::string> overrides = {}) {
  overrides.insert(overrides.begin(), "data.kind=synthetic");  // wants no path
  return parse_config(toml, "run.toml", overrides);
}

void expect_refusal(const std::string& toml, const std::vector<std::string>& overrides,
                    const std::string& why) {
  try {
    parse(toml, overrides);
    ADD_FAILURE() << "accepted, wanted: " << why;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Config);
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
  }
}
void expect_refusal(const std::string& override, const std::string& why) {
  expect_refusal("", {override}, why);
}

// Draws what parse_config accepts.
struct Draw {
  std::mt19937_64 bits;
  int64_t whole(int64_t least) { return least + int64_t(bits() % 100000); }
  bool flag() { return bits() % 2 == 0; }
  double real() {  // any that is finite and not negative
    const double value = std::bit_cast<double>(bits() >> 1);
    return std::isfinite(value) && flag() ? value : double(bits() % 1000) / 8;
  }
  std::string word(const std::string& words) {
    const auto all = split(words, ' ');
    return all[bits() % all.size()];
  }
  std::string text() {
    std::string result;
    for (uint64_t i = bits() % 9; i > 0; --i)
      result += word("a = # \" ' \\ \n \t \x01 \x7f é 牛 [x] ''' \"\"\" \\u0041 \r\n");
    return result;
  }
  std::vector<int64_t> list() {
    std::vector<int64_t> result(bits() % 40);
    for (auto& number : result) number = whole(1);
    return result;
  }
};

// Names every member, so that a new one does not compile until it is drawn here.
Config random_config(uint64_t number) {
  Draw draw{std::mt19937_64(number)};
  Config config;
  auto& [model, data, train, plan, checkpoint, run] = config;
  auto& [arch, layers, dim, heads, vocab, seq, ffn, kv_heads, patch, channels, size, classes, file,
         init] = model;
  patch = draw.whole(0), channels = draw.whole(0), size = draw.whole(0), classes = draw.whole(0);
  file = draw.text(), arch = draw.word("gpt llama mlp resnet vit torchscript"),
  layers = draw.whole(1), heads = draw.whole(1);
  dim = heads * (1 + draw.whole(0) % 1000), vocab = draw.whole(256), seq = draw.whole(1),
  ffn = draw.whole(0), kv_heads = draw.flag() ? heads : 0, init = draw.text();
  auto& [kind, path, tokenizer, documents, end, augment, shuffle, val_fraction, workers] = data;
  tokenizer = draw.text(), documents = draw.flag(), end = draw.whole(0), augment = draw.flag();
  workers = draw.whole(0) % 65, kind = draw.word("text tokens images synthetic"),
  path = cat("x", draw.text()), shuffle = draw.flag();
  val_fraction = double(draw.bits() >> 11) * 0x1p-53;
  auto& [steps, batch, micro_batch, lr, lr_schedule, warmup, weight_decay, clip, optimizer, seed,
         precision, batch_norm, on_nan, spike, eval_every, log_every] = train;
  steps = draw.whole(1), batch = draw.whole(0), micro_batch = draw.whole(0), lr = draw.real();
  lr_schedule = draw.word("constant cosine linear wsd"), warmup = draw.whole(0);
  weight_decay = draw.real(), clip = draw.real(), optimizer = draw.word("adamw sgd lion");
  seed = int64_t(draw.bits()), precision = draw.word("fp32 bf16 fp16");
  batch_norm = draw.word("sync local"), on_nan = draw.word("stop skip rollback"),
  spike = draw.real();
  eval_every = draw.whole(0), log_every = draw.whole(1);
  auto& [preset, dp, tp, pp, zero, schedule, micro_batches, sequence_parallel, recompute,
         layers_per_stage] = plan;
  preset = draw.word(" data zero1 zero2 zero3 tensor pipeline layer 2x2x1 1x16x8");
  dp = draw.whole(0), tp = draw.whole(0), pp = draw.whole(0), zero = draw.whole(0) % 5 - 1;
  schedule = draw.text(), micro_batches = draw.whole(0), sequence_parallel = draw.flag();
  recompute = draw.word("none selective full"), layers_per_stage = draw.list();
  auto& [folder, every, keep, async] = checkpoint;
  folder = draw.text(), every = draw.whole(0), keep = draw.whole(1), async = draw.flag();
  auto& [name, dir, devices, deterministic, timeout_s, max_restarts, trace_steps] = run;
  deterministic = draw.flag();
  name = draw.text(), dir = draw.text(), devices = draw.text();
  timeout_s = 1 + std::fmod(draw.real(), 1e6), max_restarts = draw.whole(0);
  if (draw.flag()) trace_steps = {draw.whole(0), draw.whole(100000)};
  return config;
}

}  // namespace

TEST(Config, TomlIsReadBackAsItWas) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Config config = random_config(seed);
    const std::string text = to_toml(config);
    ASSERT_EQ(parse_config(text, "run.toml", {}), config) << text;
  }
}

TEST(Config, WhatIsNotSaidIsTheDefault) {
  Config wanted{.data = {.kind = "synthetic"}};
  EXPECT_EQ(parse(""), wanted);
  wanted.train.lr = 3;
  wanted.train.steps = 1000;
  wanted.run.trace_steps = {3, 3};
  EXPECT_EQ(parse("[train]\nlr = 3\nsteps = 1e3\n[run]\ntrace_steps = [3, 3.0]"), wanted);
}

TEST(Config, OverridesAreReadByTheKindOfTheirKey) {
  const Config config =
      parse("[train]\nsteps = 0\nlr = 1.0",
            {"train.lr=3e-4", "train.steps=7", "train.steps=1e2", "data.shuffle=no",
             "checkpoint.async=false", "plan.sequence_parallel=yes", "plan=zero3", "run.name=3",
             "run.dir=\"a = b\"", "data.path='x'", "plan.layers_per_stage=1, 2,3",
             "run.trace_steps=[1,2]", " train.seed = -5 ", "checkpoint.dir="});
  const Config wanted{
      .data = {.kind = "synthetic", .path = "x", .shuffle = false},
      .train = {.steps = 100, .lr = 3e-4, .seed = -5},  // the last one wins, over the file too
      .plan = {.preset = "zero3", .sequence_parallel = true, .layers_per_stage = {1, 2, 3}},
      .checkpoint = {.async = false},
      .run = {.name = "3", .dir = "a = b", .trace_steps = {1, 2}}};
  EXPECT_EQ(to_toml(config), to_toml(wanted));
  EXPECT_EQ(parse("", {"run.trace_steps=1,2", "run.trace_steps="}).run.trace_steps.size(), 0u);
}

TEST(Config, UnknownKeysAreRefusedWithTheNearestOnes) {
  expect_refusal(
      "\n[train]\nsteps = 1\nstpes = 3", {},
      "run.toml:4: train.stpes: no such key; did you mean train.steps? [train] has steps");
  expect_refusal("[trian]\nlr = 3", {},
                 "run.toml:1: trian: no such section; did you mean [train]?");
  expect_refusal("[run]\npath = 'x'", {}, "did you mean");
  expect_refusal("lr = 3", {}, "run.toml:1: lr: no such section; did you mean train.lr or");
  expect_refusal("[serving]", {},
                 "no such section. There are model, data, train, plan, checkpoint, run");
  expect_refusal("train.lrr=3", "override train.lrr: no such key; did you mean train.lr? ");
  expect_refusal("trian.lr=3", "did you mean [train] or train.lr");
  expect_refusal("dir=3", "checkpoint.dir or run.dir");
  expect_refusal("train=3", "[train] has steps, batch");
  expect_refusal("train.steps", "override 'train.steps': wanted section.key=value");
  expect_refusal("=3", "override '=3': wanted section.key=value");
}

TEST(Config, ValuesOfAnotherKindAreRefused) {
  expect_refusal("[train]\nsteps = 'many'", {},
                 "run.toml:2: train.steps: got the string \"many\", wanted an integer");
  expect_refusal("[train]\nsteps = 1.5", {}, "got the floating-point 1.5, wanted an integer");
  expect_refusal("[train]\nsteps = true", {}, "got the boolean true, wanted an integer");
  expect_refusal("[data]\nshuffle = 1", {}, "got the integer 1, wanted true or false");
  expect_refusal("[run]\nname = 3", {}, "got the integer 3, wanted a string");
  expect_refusal("[run]\ntrace_steps = [1, 'x']", {}, "\"x\" ], wanted a list of integers");
  expect_refusal("[train.lr]\nx = 1", {}, "train.lr: got a table, wanted a number");
  expect_refusal("train = 3", {}, "train: got the integer 3, wanted a section: say [train]");
  expect_refusal("[[model]]\ndim = 3", {}, "wanted a section: say [model]");
  expect_refusal("train.steps=1e30", "override train.steps: got '1e30', wanted an integer");
  expect_refusal("train.steps=", "got '', wanted an integer");
  expect_refusal("train.lr=fast", "got 'fast', wanted a number, as 0.5 or 3e-4");
  expect_refusal("data.shuffle=maybe", "got 'maybe', wanted true or false");
  expect_refusal("run.trace_steps=1,b", "got '1,b', wanted a list of integers");
  expect_refusal("run.name=\xff", "wanted text in UTF-8");
}

TEST(Config, TextThatIsNotTomlIsRefusedWithItsPlace) {
  expect_refusal("[model]\narch = gpt", {}, "run.toml:2:8: Error while parsing value");
  expect_refusal("[model]\narch = gpt", {}, "; words stand in quotes");
  expect_refusal("[model]\ndim = 1\ndim = 2", {}, "run.toml:3:7: ");
}

TEST(Config, WordsThatAreNotThereAreRefused) {
  expect_refusal("[train]\noptimizer = 'adam'", {},
                 "run.toml:2: train.optimizer: got \"adam\", wanted one of adamw, sgd, lion; "
                 "did you mean adamw?");
  expect_refusal("train.on_nan=panic", "got \"panic\", wanted one of stop, skip, rollback");
  expect_refusal("plan=zero4", "override plan.preset: got \"zero4\", wanted one of data, zero1");
  expect_refusal("plan=2x0x1", "layer, AxBxC");
  expect_refusal("plan=AxBxC", "layer, AxBxC");
}

TEST(Config, NumbersThatMakeNoSenseAreRefused) {
  expect_refusal("[train]\nsteps = 0", {}, "run.toml:2: train.steps: got 0, wanted at least 1");
  expect_refusal("model.seq=0", "override model.seq: got 0, wanted at least 1");
  expect_refusal("", {"model.heads=3", "model.dim=128"},
                 "model.heads: got 3, wanted a divisor of model.dim = 128");
  EXPECT_EQ(parse("", {"model.arch=mlp", "model.dim=10"}).model.dim, 10) << "an mlp has no heads";
  expect_refusal("data.val_fraction=1", "got 1.0, wanted less than 1");
  expect_refusal("data.val_fraction=-0.5", "got -0.5, wanted at least 0");
  expect_refusal("train.lr=-1e-3", "got -0.001, wanted at least 0");
  expect_refusal("train.lr=inf", "got inf, wanted a finite number");
  expect_refusal("train.lr=nan", "got nan, wanted a finite number");
  expect_refusal("train.clip=-1", "got -1.0, wanted at least 0");
  expect_refusal("checkpoint.keep=0", "got 0, wanted at least 1");
  expect_refusal("run.timeout_s=0", "got 0.0, wanted more than 0");
  expect_refusal("run.timeout_s=1e10", "at most 2147483647");
  expect_refusal("plan.dp=4294967298", "at most 2147483647");
  expect_refusal("plan.zero=4", "got 4, wanted -1 to 3");
  expect_refusal("plan.zero=-2", "got -2, wanted at least -1");
  expect_refusal("plan.tp=-1", "got -1, wanted at least 0");
  expect_refusal("plan.layers_per_stage=2,0", "got [2, 0], wanted at least 1 in each");
  expect_refusal("run.trace_steps=3", "got [3], wanted none, or the first and the last step");
  expect_refusal("run.trace_steps=3,2", "got [3, 2], wanted none, or");
  expect_refusal("data.kind=images", "run.toml: data.path: got \"\", wanted a folder of images");
  expect_refusal("data.kind=tokens", "run.toml: data.path: got \"\", wanted a .bin or .npy");
  expect_refusal("", {"data.kind=text", "data.path=x", "model.vocab=255"},
                 "model.vocab: got 255, wanted at least 256");
}

TEST(Config, KeysAreDescribedInColumns) {
  const auto lines = split(describe_keys(), '\n');
  EXPECT_EQ(lines[0],
            "model.arch = \"gpt\"               the architecture: gpt, llama, mlp, resnet, vit, "
            "torchscript");
  EXPECT_EQ(lines[26], "train.lr = 0.001                 the highest learning rate");
  for (size_t i = 0; i + 1 < lines.size(); ++i)
    EXPECT_TRUE(lines[i][32] == ' ' && lines[i][33] != ' ') << lines[i];
  EXPECT_TRUE(
      to_toml({}).starts_with("[model]\narch = \"gpt\"                # the architecture: gpt, "
                              "llama, mlp, resnet, vit, torchscript\nlayers = 0     "));
}

}  // namespace yoke::train
