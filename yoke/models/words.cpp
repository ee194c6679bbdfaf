// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/words.h"

#include <ATen/Functions.h>

#include "yoke/parallel/cross_entropy.h"

namespace yoke::models {

Model words_model(int64_t layers, int64_t dim, int64_t vocab, int64_t seq, int64_t block, bool tied,
                  at::Device device) {
  Model model{.tokens = seq,
              .can_scatter = true,
              .device = device,
              .input = port("tokens", plan::Type::Int64, {-1, -1}),
              .output = port("logits", plan::Type::Fp32, {-1, -1, vocab})};
  if (tied) model.ties = {{kWords, head_name(layers)}};
  // 2 for each weight forward, 4 backward; attention's two products over all tokens, as the MFU of
  // others counts them (Chowdhery et al., 2022).
  model.flops = 6.0 * double(layers * block + vocab * dim) + 12.0 * double(layers * seq * dim);
  model.costs.assign(size_t(layers) + 2, double(block + seq * dim));
  model.costs.front() = double(dim);
  model.costs.back() = double(vocab * dim);
  model.loss_sum = [](const at::Tensor& logits, const at::Tensor& target,
                      const parallel::TensorAxis& axis) {
    return parallel::cross_entropy_sum(logits.reshape({-1, logits.size(-1)}), target.reshape({-1}),
                                       axis);
  };
  return model;
}

}  // namespace yoke::models
