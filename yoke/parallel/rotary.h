// SPDX-License-Identifier: Apache-2.0
// Rotary positions (Su et al., 2021): pairs of features of a query or key are turned by an angle
// that grows with its place, so that their product knows how far apart they are. A feature's
// partner is half a head away, as in Llama.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace yoke::parallel {

struct RotaryOptions {
  double base = 0;  // 0: no positions
  // Llama 3.1's stretch: slow turns are `factor` times slower, those between are mixed.
  double factor = 1, low = 1, high = 4;
  int64_t original = 0;  // tokens before the stretch; 0: none
};

class Rotary {
 public:
  Rotary() = default;
  // Throws Kind::Usage where a head has an odd number of features.
  Rotary(int64_t head_dim, const RotaryOptions& options);
  // x [..., tokens, head_dim], whose first token has the place `first`.
  at::Tensor turn(const at::Tensor& x, int64_t first) const;

 private:
  struct Table;
  std::shared_ptr<Table> table_;
};

}  // namespace yoke::parallel
