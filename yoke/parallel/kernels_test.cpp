// SPDX-License-Identifier: Apache-2.0
// With YOKE_TEST_DEVICE=cuda:0 on a GPU; without it there are no kernels, and LibTorch's operations
// are compared with themselves.
#include "yoke/parallel/kernels.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include "yoke/parallel/cross_entropy.h"
#include "yoke/parallel/layers.h"
#include "yoke/parallel/ranks_test.h"

namespace yoke::parallel {
namespace {

struct Outcome {
  double loss = 0;
  at::Tensor gradient = {};
};

Outcome outcome_of(const at::Tensor& loss, const at::Tensor& leaf) {
  leaf.mutable_grad().reset();
  loss.backward();
  return {loss.item<double>(), leaf.grad().to(at::kDouble)};
}

}  // namespace

TEST(Kernels, AreThereOnAGpuAlone) {
  const at::Tensor x = at::zeros({4, 4}, at::device(test_device()));
  load_kernels(test_device(), 768);
  EXPECT_EQ(has_kernels(x), x.is_cuda());
  EXPECT_FALSE(has_kernels(x.t().narrow(0, 0, 2)));
  EXPECT_FALSE(has_kernels(x.to(at::kDouble)));
}

TEST(Kernels, CrossEntropyIsLibTorchs) {
  for (const int64_t words : {1, 7, 64, 1000, 50304})
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const double factor = type == at::kHalf ? 128 : 1;
      const at::Tensor leaf =
          normal("logits", {37, words}, 3).to(test_device(), type).requires_grad_(true);
      at::Tensor targets = (at::arange(37) * 7919 % words).to(test_device());
      targets[5] = -100;
      const auto expected = outcome_of(
          at::cross_entropy_loss(leaf.to(at::kDouble), targets, {}, at::Reduction::Sum) * factor,
          leaf);
      const auto actual =
          outcome_of(cross_entropy_sum(leaf * 1, targets).to(at::kDouble) * factor, leaf);
      const double bits = type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 8e-3;
      EXPECT_NEAR(actual.loss / factor, expected.loss / factor, 1e-5 * (1 + expected.loss / factor))
          << words << " " << c10::toString(type);
      EXPECT_LT((actual.gradient - expected.gradient).abs().max().item<double>(), bits * factor)
          << words << " " << c10::toString(type);
      // Without a gradient the logits stay as they are.
      const at::NoGradGuard no_grad;
      const at::Tensor logits = leaf.detach().clone();
      const double again = cross_entropy_sum(logits, targets).item<double>();
      EXPECT_NEAR(again, expected.loss / factor, 1e-5 * (1 + again));
      EXPECT_TRUE(at::equal(logits, leaf));
    }
}

TEST(Kernels, CrossEntropyOfWhatIsNoNumberIsNone) {
  const at::Tensor logits = at::zeros({2, 64}, at::device(test_device()));
  logits[1][3] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor targets = at::zeros({2}, at::device(test_device()).dtype(at::kLong));
  EXPECT_TRUE(std::isnan(cross_entropy_sum(logits, targets).item<double>()));
  const at::Tensor lowest =
      at::full({1, 64}, -std::numeric_limits<float>::infinity(), at::device(test_device()));
  lowest[0][7] = 0;
  EXPECT_NEAR(cross_entropy_sum(lowest, at::full({1}, 7, targets.options())).item<double>(), 0,
              1e-6);
}

// Against LibTorch's in float64, with and without a branch, and whoever uses the sum.
TEST(Kernels, NormsAreLibTorchs) {
  for (const int64_t dim : {8, 72, 768, 1600, 2048, 2056})
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const bool adds : {false, true}) {
        LayerNorm norm(torch::nn::LayerNormOptions({dim}));
        {
          const at::NoGradGuard no_grad;
          norm->weight.copy_(normal("w", {dim}, 1));
          norm->bias.copy_(normal("b", {dim}, 1));
        }
        norm->to(test_device(), type);
        const auto leaf = [&](const char* name) {
          return normal(name, {3, 67, dim}, 1).to(test_device(), type).requires_grad_(true);
        };
        const at::Tensor x = leaf("x"), y = adds ? leaf("y") : at::Tensor();
        const at::Tensor up = normal("up", {3, 67, dim}, 1).to(test_device(), type);
        const at::Tensor aside = normal("aside", {3, 67, dim}, 1).to(test_device(), type);
        const auto gradients = [&](const at::Tensor& whole, const at::Tensor& normed) {
          torch::autograd::variable_list leaves{x, norm->weight, norm->bias};
          if (adds) leaves.push_back(y);
          return torch::autograd::grad(
              {whole, normed}, leaves,
              {aside.to(whole.scalar_type()), up.to(normed.scalar_type())});
        };
        const auto [whole, normed] = norm->sum(x, y);
        const auto actual = gradients(whole, normed);
        const auto wide = [](const at::Tensor& t) -> at::Tensor { return t.to(at::kDouble); };
        const at::Tensor sum = adds ? x + y : x;
        EXPECT_TRUE(at::equal(whole, sum));
        const at::Tensor expected = at::layer_norm(wide(sum), {dim}, wide(norm->weight),
                                                   wide(norm->bias), norm->options.eps());
        const double bits = type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 8e-3;
        EXPECT_LT((wide(normed) - expected).abs().max().item<double>(), bits * 16)
            << dim << " " << c10::toString(type);
        const auto wanted = gradients(sum, expected);
        for (size_t i = 0; i < wanted.size(); ++i) {
          const double most = wide(wanted[i]).abs().max().item<double>();
          EXPECT_LT((wide(actual[i]) - wide(wanted[i])).abs().max().item<double>(),
                    bits * (x.is_cuda() ? 2 : 8) * most)
              << dim << " " << c10::toString(type) << " " << i;
        }
        EXPECT_TRUE(at::equal(norm->forward(sum.detach()), normed));
      }
}

}  // namespace yoke::parallel
