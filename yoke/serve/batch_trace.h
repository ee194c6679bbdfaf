// SPDX-License-Identifier: Apache-2.0
// The last batches of every replica as a timeline that Perfetto and `yoke trace` open: a replica is
// what a rank is there, and a batch has three spans: its inputs, the model, its outputs. On a GPU
// the model's has two within: the copies there and back.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace yoke::serve {

struct BatchSpan {
  int replica = 0;
  uint32_t rows = 0;
  int64_t sealed_at = 0, begun_at = 0, computed_at = 0, done_at = 0;  // nanoseconds
  int64_t copy_in = 0, copy_out = 0;  // by a GPU, the latter at the end of the model's span
  int64_t copies = 0;                 // from the begin of the one to the end of the other
};

class BatchTrace {
 public:
  explicit BatchTrace(size_t most) : most_(most) {}
  void add(const BatchSpan& span);
  std::string json() const;

 private:
  const size_t most_;
  size_t next_ = 0;
  std::vector<BatchSpan> spans_ = {};  // a ring once it is full
};

}  // namespace yoke::serve
