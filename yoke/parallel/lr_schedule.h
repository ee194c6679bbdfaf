// SPDX-License-Identifier: Apache-2.0
// The learning rate of each step: a linear warm-up, then a shape.
#pragma once

#include <cstdint>
#include <string_view>

namespace yoke::parallel {

struct LrSchedule {
  // Wsd: warm-up, stable, then linear decay over the last part (Hu et al., 2024).
  enum class Shape { Constant, Cosine, Linear, Wsd };

  Shape shape = Shape::Constant;
  double lr = 1e-3;    // the highest
  int64_t warmup = 0;  // steps; the first of them is already above 0
  int64_t steps = 0;   // in all; after them the rate stays at its lowest
  double lowest = 0;   // as a part of lr
  double decay = 0.2;  // Wsd: the part of the steps that decays

  double at(int64_t step) const;  // the first step is 0
  // Throws Kind::Usage with what does not fit together.
  void check() const;
};

// "constant", "cosine", "linear", "wsd"; throws Kind::Usage with the nearest names.
LrSchedule::Shape parse_lr_shape(std::string_view name);

}  // namespace yoke::parallel
