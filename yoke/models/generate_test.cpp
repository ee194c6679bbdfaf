// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/generate.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <map>

#include "yoke/base/error.h"
#include "yoke/parallel/matvec.h"
#include "yoke/parallel/passing.h"

namespace yoke::models {
namespace {

const GptOptions kGpt{.layers = 3, .dim = 32, .heads = 4, .vocab = 50, .seq = 40};
const LlamaOptions kLlama{
    .layers = 3, .dim = 32, .heads = 4, .vocab = 50, .seq = 40, .kv_heads = 2};

// Everything computed anew for every token.
std::vector<int64_t> slowly(const Whole& model, std::vector<int64_t> text, int64_t tokens) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < tokens; ++i) {
    const at::Tensor logits = model.forward(at::tensor(text, at::kLong).unsqueeze(0));
    text.push_back(logits[0][-1].argmax().item<int64_t>());
    result.push_back(text.back());
  }
  return result;
}

}  // namespace

TEST(Generate, WithWhatIsKeptIsAsWithout) {
  for (const Architecture& architecture : std::vector<Architecture>{kGpt, kLlama}) {
    const Whole model(architecture, at::kCPU);
    const auto expected = slowly(model, {7, 3, 11}, 20);
    EXPECT_EQ(generate(model, {7, 3, 11}, {.tokens = 20, .sampling = {.temperature = 0}}),
              expected);
    // Several tokens after others, at once.
    const auto past = std::make_shared<parallel::KvCache>(40);
    const parallel::Passing::Scope scope({.past = past});
    model.forward(at::tensor({7, 3}, at::kLong).unsqueeze(0));
    past->advance(2);
    std::vector<int64_t> more{11};
    more.insert(more.end(), expected.begin(), expected.begin() + 4);
    const at::Tensor logits = model.forward(at::tensor(more, at::kLong).unsqueeze(0));
    for (int64_t i = 0; i < 5; ++i)
      EXPECT_EQ(logits[0][i].argmax().item<int64_t>(), expected[size_t(i)]);
  }
}

// A layer for one token on several threads is the layer.
TEST(Generate, OneTokenOnAllThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  const at::NoGradGuard no_grad;
  for (const int64_t outputs : {3 * 128, 3 * 128 + 2}) {
    const at::Tensor weight = at::randn({outputs, 300}), bias = at::randn({outputs});
    const at::Tensor x = at::randn({1, 1, 300});
    ASSERT_TRUE(parallel::is_matvec(x, weight));
    const at::Tensor y = parallel::matvec(x, weight, bias);
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{1, 1, outputs}));
    EXPECT_TRUE(at::allclose(y, at::linear(x, weight, bias), 1e-4, 1e-4));
    EXPECT_FALSE(parallel::is_matvec(at::randn({2, 300}), weight));
    EXPECT_FALSE(parallel::is_matvec(x, at::randn({300, outputs}).t()));
  }
  at::set_num_threads(threads);
}

TEST(Generate, StopsWhereItIsTold) {
  const Whole model(kGpt, at::kCPU);
  const auto all = generate(model, {1}, {.tokens = 8, .sampling = {.temperature = 0}});
  EXPECT_EQ(all.size(), 8u);
  const auto ended =
      generate(model, {1}, {.tokens = 8, .sampling = {.temperature = 0}, .end = all[0]});
  EXPECT_EQ(ended, std::vector<int64_t>{all[0]});
  int seen = 0;
  generate(model, {1}, {.tokens = 8, .on_token = [&](int64_t) { return ++seen < 3; }});
  EXPECT_EQ(seen, 3);
  EXPECT_EQ(generate(model, std::vector<int64_t>(38, 1), {.tokens = 8}).size(), 3u);  // positions
  EXPECT_THROW(generate(model, {}, {}), Error);
  EXPECT_THROW(generate(model, std::vector<int64_t>(41, 1), {}), Error);
  EXPECT_THROW(generate(model, {50}, {}), Error);
  EXPECT_THROW(generate(model, {1}, {.sampling = {.temperature = -1}}), Error);
  EXPECT_THROW(generate(model, {1}, {.sampling = {.top_p = 0}}), Error);
  const Whole other(MlpOptions{}, at::kCPU);
  EXPECT_THROW(generate(other, {1}, {}), Error);
}

TEST(Generate, DrawsByProbability) {
  const at::Tensor logits = at::tensor({0.5f, 0.3f, 0.15f, 0.05f}).log();
  const auto parts = [&](const Sampling& sampling) {
    std::map<int64_t, double> counts;
    for (uint64_t place = 0; place < 20000; ++place)
      counts[choose(logits, sampling, place)] += 1 / 20000.0;
    return counts;
  };
  auto all = parts({});
  EXPECT_NEAR(all[0], 0.5, 0.02);
  EXPECT_NEAR(all[3], 0.05, 0.01);
  auto two = parts({.top_k = 2});
  EXPECT_EQ(two.size(), 2u);
  EXPECT_NEAR(two[0], 0.625, 0.02);
  auto nucleus = parts({.top_p = 0.75});
  EXPECT_EQ(nucleus.size(), 2u);
  EXPECT_NEAR(nucleus[1], 0.375, 0.02);
  auto cold = parts({.temperature = 0.5});
  EXPECT_NEAR(cold[0], 0.25 / 0.365, 0.02);
  EXPECT_EQ(parts({.temperature = 0}).size(), 1u);
  EXPECT_EQ(choose(logits, {.seed = 3}, 9), choose(logits, {.seed = 3}, 9));
}

}  // namespace yoke::models
