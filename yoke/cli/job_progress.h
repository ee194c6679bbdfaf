// SPDX-License-Identifier: Apache-2.0
// How far the job of a verb is, on stderr; of one that takes less than a second nothing is shown.
#pragma once

#include <unistd.h>

#include <iostream>
#include <string>

#include "yoke/observe/progress.h"

namespace yoke::cli {

class JobProgress {
 public:
  JobProgress(const std::string& label, uint64_t total, const std::string& unit)
      : progress_(std::cerr, clock_,
                  {.label = label,
                   .total = total,
                   .unit = unit,
                   .is_terminal = ::isatty(STDERR_FILENO) == 1,
                   .patience = std::chrono::seconds(1)}) {}
  void update(uint64_t done) { progress_.update(done); }

 private:
  const SteadyClock clock_;
  observe::Progress progress_;
};

}  // namespace yoke::cli
