// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::parallel {

double LrSchedule::at(int64_t step) const {
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  const int64_t rest = std::max<int64_t>(1, steps - warmup);
  const double done = std::min(1.0, double(step - warmup) / double(rest));  // of what follows
  auto between = [&](double height) { return lr * (lowest + (1 - lowest) * height); };
  switch (shape) {
    case Shape::Cosine:
      return between(0.5 * (1 + std::cos(std::numbers::pi * done)));
    case Shape::Linear:
      return between(1 - done);
    case Shape::Wsd: {
      const double falling = decay * double(steps), left = double(steps - step);
      return between(std::clamp(left / std::max(falling, 1.0), 0.0, 1.0));
    }
    default:
      return lr;
  }
}

void LrSchedule::check() const {
  if (!(lr >= 0) || !(lowest >= 0 && lowest <= 1) || !(decay >= 0 && decay <= 1))
    fail(Kind::Usage,
         "a learning rate schedule wants lr of 0 or more, lowest and decay of 0 to 1; ", "got ", lr,
         ", ", lowest, " and ", decay);
  if (warmup < 0 || (shape != Shape::Constant && steps <= warmup))
    fail(Kind::Usage,
         "a learning rate schedule that decays wants more steps than its warm-up; got ", steps,
         " steps with a warm-up of ", warmup);
}

LrSchedule::Shape parse_lr_shape(std::string_view name) {
  using Shape = LrSchedule::Shape;
  static const std::map<std::string, Shape, std::less<>> shapes = {{"constant", Shape::Constant},
                                                                   {"cosine", Shape::Cosine},
                                                                   {"linear", Shape::Linear},
                                                                   {"wsd", Shape::Wsd}};
  const auto found = shapes.find(name);
  if (found == shapes.end())
    fail(Kind::Usage, "there is no learning rate schedule '", name,
         "'; there are constant, cosine, linear and wsd");
  return found->second;
}

}  // namespace yoke::parallel
