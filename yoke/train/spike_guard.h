// SPDX-License-Identifier: Apache-2.0
// Notices a loss that is far above the last ones: by its z-score under an exponential mean and
// variance. Values: every rank's is fed the same and says the same.
#pragma once

#include <cstdint>
#include <string>

namespace yoke::train {

class SpikeGuard {
 public:
  explicit SpikeGuard(double limit) : limit_(limit) {}  // standard deviations; 0: never
  // The z-score if it is a spike, else 0. A spike leaves no trace in what the next are compared
  // with.
  double see(double loss);

  std::string text() const;  // to go on with
  void restore(const std::string& text);

 private:
  const double limit_;
  int64_t seen_ = 0;
  double mean_ = 0, variance_ = 0;
};

}  // namespace yoke::train
