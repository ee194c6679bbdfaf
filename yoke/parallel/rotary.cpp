// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/rotary.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <mutex>
#include <numbers>
#include <vector>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

// Of each pair, radians from one token to the next.
std::vector<float> speeds(int64_t head_dim, const RotaryOptions& options) {
  std::vector<float> result;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    double speed = std::pow(options.base, -2.0 * double(i) / double(head_dim));
    if (options.original > 0) {
      const double turns = double(options.original) * speed / (2 * std::numbers::pi);
      const double part =
          std::clamp((turns - options.low) / (options.high - options.low), 0.0, 1.0);
      speed *= part + (1 - part) / options.factor;
    }
    result.push_back(float(speed));
  }
  return result;
}

}  // namespace

// Cosines and sines of the places so far asked for, with the signs of the two halves.
struct Rotary::Table {
  at::Tensor speeds;  // float32, on the CPU
  std::mutex mutex;
  at::Tensor cosines, sines;  // float32 [places, head_dim], where they were last wanted

  std::pair<at::Tensor, at::Tensor> at_places(int64_t first, int64_t count,
                                              const at::Tensor& like) {
    const std::lock_guard lock(mutex);
    const int64_t end = first + count;
    if (!cosines.defined() || cosines.size(0) < end || cosines.device() != like.device()) {
      const at::NoGradGuard no_grad;
      int64_t places = 64;
      while (places < end) places *= 2;
      const at::Tensor angles = at::outer(at::arange(places, at::kFloat), speeds);
      const at::Tensor both = at::cat({angles, angles}, 1);
      cosines = both.cos().to(like.device());
      sines = at::cat({-angles.sin(), angles.sin()}, 1).to(like.device());
    }
    return {cosines.narrow(0, first, count).to(like.scalar_type()),
            sines.narrow(0, first, count).to(like.scalar_type())};
  }
};

Rotary::Rotary(int64_t head_dim, const RotaryOptions& options) {
  if (options.base == 0) return;
  if (head_dim % 2 != 0 || !(options.base > 1) || !(options.factor >= 1) ||
      !(options.high > options.low))
    fail(Kind::Usage,
         "rotary positions want an even number of features in a head, a base above 1, a factor of "
         "1 or more and high above low; got ",
         head_dim, ", ", options.base, ", ", options.factor, ", ", options.high, " and ",
         options.low);
  table_ = std::make_shared<Table>();
  table_->speeds = at::tensor(speeds(head_dim, options));
}

at::Tensor Rotary::turn(const at::Tensor& x, int64_t first) const {
  if (!table_) return x;
  const auto [cosines, sines] = table_->at_places(first, x.size(-2), x);
  return x * cosines + x.roll(x.size(-1) / 2, -1) * sines;
}

}  // namespace yoke::parallel
