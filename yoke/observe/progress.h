// SPDX-License-Identifier: Apache-2.0
// How far a long job is. A terminal gets one line that is redrawn at most ten times a second, a
// pipe gets a plain line for each tenth of the job:
//   train [=========>          ]  45 %  450/1000 steps  12.3 steps/s  ETA 45 s  loss 2.31
//   train: 40 %, 400/1000 steps, 12.3 steps/s, ETA 49 s, loss 2.40
// Threads: the one that made it. The line is ended when the job is done or the object dies.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

#include "yoke/base/clock.h"

namespace yoke::observe {

struct ProgressOptions {
  std::string label;
  uint64_t total = 0;
  uint64_t initial = 0;  // done before we began, as after a resume: does not count for the rate
  std::string unit = "steps";
  bool is_terminal = false;
  size_t columns = 80;     // of the terminal; a longer line is cut
  Duration patience = {};  // before it nothing is shown, and of a shorter job nothing at all
};

class Progress {
 public:
  Progress(std::ostream& out, const Clock& clock, ProgressOptions options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is shown at the end of the line.
  void update(uint64_t done, std::string_view note = {});

 private:
  std::string text(uint64_t done, std::string_view note) const;

  std::ostream& out_;
  const Clock& clock_;
  const ProgressOptions options_;
  const Time start_;
  Time next_draw_;
  uint64_t next_tenth_;    // the one that the next plain line waits for
  bool finished_ = false;  // the last line is out
  bool line_open_ = false;
};

}  // namespace yoke::observe
