// SPDX-License-Identifier: Apache-2.0
// The way there and back. That transformers reads it the same is for a test with the real package.
#include "yoke/models/hugging_face.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/checkpoint/safetensors.h"

namespace yoke::models {
namespace {

using checkpoint::Path;

struct Whole {
  explicit Whole(const WordsOptions& options) {
    const Model model = make_words(options);
    for (const auto& factory : model.layers({})) layers.push_back(factory());
    EXPECT_LE(model.num_parameters, num_elements());
  }
  int64_t num_elements() const {
    int64_t count = 0;
    for (const auto& layer : layers)
      for (const auto& parameter : layer.module->parameters()) count += parameter.numel();
    return count;
  }
  at::Tensor operator()(at::Tensor x) const {
    const at::NoGradGuard no_grad;
    for (const auto& layer : layers) x = layer.forward(x);
    return x;
  }
  at::Tensor parameter(const std::string& name) const {
    const auto dot = name.find('.');
    return layers[std::stoul(name)].module->named_parameters()[name.substr(dot + 1)].detach();
  }
  std::vector<parallel::Layer> layers;
};

const at::Tensor kText = at::arange(12, at::kLong).view({2, 6});

const GptOptions kGpt{.layers = 2, .dim = 16, .heads = 2, .vocab = 24, .seq = 8};
const LlamaOptions kLlama{
    .layers = 2, .dim = 16, .heads = 4, .vocab = 24, .seq = 8, .kv_heads = 2, .ffn = 32};

class HuggingFace : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const WordsOptions& options) const {
    const Whole model(options);
    write_hugging_face(folder_, options, [&](const auto& name) { return model.parameter(name); });
  }
  std::string config() const {
    std::ifstream file(folder_ / "config.json");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void set_config(const std::string& text) const { std::ofstream(folder_ / "config.json") << text; }
  // The error of reading says so.
  void refuses(const std::string& what) const {
    try {
      read_hugging_face(folder_);
      ADD_FAILURE() << "it was read, without '" << what << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Kind::Io);
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  }
  const Path folder_ =
      Path(testing::TempDir()) / ("yoke_hugging_face_" + std::to_string(::getpid()));
};

}  // namespace

TEST_F(HuggingFace, ThereAndBackIsTheSameModel) {
  LlamaOptions tied = kLlama, qwen = kLlama, wide = kLlama;
  tied.tied = true;
  tied.rotary = {.base = 500000, .factor = 8, .original = 4};
  qwen.qkv_bias = true;
  wide.head_dim = 6;
  wide.eps = 1e-6;
  for (const WordsOptions& options : std::vector<WordsOptions>{kGpt, kLlama, tied, qwen, wide}) {
    write(options);
    const auto read = read_hugging_face(folder_);
    EXPECT_TRUE(at::equal(Whole(options)(kText), Whole(read)(kText))) << options.index();
    EXPECT_EQ(Whole(options).num_elements(), Whole(read).num_elements());
  }
}

TEST_F(HuggingFace, FewerPositionsAreTheFirst) {
  write(kGpt);
  auto read = std::get<GptOptions>(read_hugging_face(folder_));
  read.seq = 6;
  EXPECT_TRUE(at::equal(Whole(kGpt)(kText), Whole(read)(kText)));
}

TEST_F(HuggingFace, WhatDoesNotFitIsNamed) {
  refuses("it is no folder of a model");
  write(kGpt);
  const std::string good = config();
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  set_config("{");
  refuses("is no JSON");
  struct Case {
    const char *from, *to, *says;
  };
  for (const auto& [from, to, says] : std::vector<Case>{
           {"\"gpt2\"", "\"mamba\"", "of the type 'mamba'; known are gpt2, llama and qwen2"},
           {"gelu_new", "relu",
            "asks for activation_function = \"relu\", which this model cannot do"},
           {"{", "{\"logit_softcap\": 30.0,", "asks for logit_softcap = 30.0"},
           {"\"n_layer\": 2", "\"n_layer\": 3", "has no tensor 'h.2."},
           {"\"n_layer\": 2", "\"n_layer\": 1", "has a tensor 'transformer.h.1."},
           {"\"vocab_size\": 24", "\"vocab_size\": 25",
            "is [24, 16], and by config.json it is [25, 16]"},
           {"\"n_head\": 2", "\"n_head\": \"two\"", "n_head is \"two\""}}) {
    set_config(replaced(from, to));
    refuses(says);
  }
  set_config(replaced("{", "{\"something\": null, \"other\": false,"));
  EXPECT_NO_THROW(read_hugging_face(folder_));
  set_config(good);
  const Path weights = folder_ / "model.safetensors";
  std::filesystem::resize_file(weights, std::filesystem::file_size(weights) - 5);
  refuses("model.safetensors");
}

}  // namespace yoke::models
