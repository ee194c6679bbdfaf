// SPDX-License-Identifier: Apache-2.0
// Several trainers in turn, again and again: what disturbs the machine disturbs them alike, and the
// median of the ratios counts.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "yoke/cli/bench_data.h"

namespace yoke::cli {

// A comma-separated list of words out of `known`; throws Kind::Usage with the nearest.
std::vector<std::string> words(const std::string& option, const std::string& text,
                               const std::vector<std::string>& known);

class Turns {
 public:
  // `steps` of a round; 0: about a second. Shows its progress on stderr.
  Turns(const std::vector<std::string>& names,
        const std::function<std::unique_ptr<Trainer>(const std::string&)>& make, int rounds,
        int steps, const std::string& what);

  double ms(size_t i) const;  // of a step, the median
  // How many times as long as the i-th the other takes.
  double ratio(size_t i, size_t other) const;
  Trainer& trainer(size_t i) const { return *trainers_[i]; }

 private:
  std::vector<std::unique_ptr<Trainer>> trainers_;
  std::vector<std::vector<double>> times_;  // of a step, in ms, by trainer and round
};

}  // namespace yoke::cli
