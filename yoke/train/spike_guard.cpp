// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/spike_guard.h"

#include <cmath>
#include <sstream>

#include "yoke/base/text.h"
#include "yoke/observe/json_lines.h"

namespace yoke::train {
namespace {

constexpr int64_t kWarmup = 20;   // losses before the first verdict
constexpr double kWeight = 0.05;  // of the newest

}  // namespace

double SpikeGuard::see(double loss) {
  if (!std::isfinite(loss)) return 0;  // not for us
  const double apart = loss - mean_;
  const double score = apart / std::sqrt(variance_ + 1e-12);
  if (limit_ > 0 && seen_ >= kWarmup && score > limit_) return score;
  // The first ones weigh as in a plain mean.
  const double weight = std::max(kWeight, 1.0 / double(++seen_));
  mean_ += weight * apart;
  variance_ = (1 - weight) * (variance_ + weight * apart * apart);
  return 0;
}

std::string SpikeGuard::text() const {
  return std::to_string(seen_) + " " + observe::json_number(mean_) + " " +
         observe::json_number(variance_);
}

void SpikeGuard::restore(const std::string& text) {
  std::istringstream(text) >> seen_ >> mean_ >> variance_;
}

}  // namespace yoke::train
