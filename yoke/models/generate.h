// SPDX-License-Identifier: Apache-2.0
// Text from a model of words, token by token, with the keys and values of those before kept.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "yoke/models/whole.h"

namespace yoke::models {

struct Sampling {
  double temperature = 1;  // 0: always the likeliest
  int64_t top_k = 0;       // out of so many likeliest; 0: of all
  double top_p = 1;        // out of the fewest that have so much of the probability
  uint64_t seed = 1;
  void check() const;  // throws Kind::Usage
};
// The token at a place of a text, by [vocab] logits. The same seed and place draw the same.
int64_t choose(const at::Tensor& logits, const Sampling& sampling, uint64_t place);

struct GenerateOptions {
  int64_t tokens = 64;  // the most
  Sampling sampling = {};
  std::optional<int64_t> end = {};                        // the token that ends a text
  std::function<bool(int64_t token)> on_token = nullptr;  // false: stop
};
// What follows the prompt, at least one token, which may be `end`. Less than asked for where the
// model knows no more positions.
std::vector<int64_t> generate(const Whole& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options);

}  // namespace yoke::models
