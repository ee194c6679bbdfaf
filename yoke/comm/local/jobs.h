// SPDX-License-Identifier: Apache-2.0
// Every collective is a list of jobs: fold some sources, in rank order, into some targets (one
// source: copy it). Jobs of one operation touch disjoint targets, and no target is another job's
// source, so they can be cut into items and run by any rank in any order with the same result.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "yoke/comm/local/reduce.h"
#include "yoke/comm/operation.h"

namespace yoke::comm {

struct Job {
  std::vector<at::Tensor> sources;  // flat, of equal size
  std::vector<at::Tensor> targets;  // less those that are the source itself
};

// The jobs of a collective, from the parts of all ranks in rank order; empty ones are left out.
std::vector<Job> jobs_of(const std::vector<Operation>& parts);

// Jobs on CPU memory, cut into items of about equal size; what is small is one item.
class CpuItems {
 public:
  CpuItems() = default;
  CpuItems(const std::vector<Job>& jobs, const Operation& operation);
  int64_t size() const { return total_; }
  void run(int64_t item) const;

 private:
  struct Span {
    std::vector<const void*> sources;
    std::vector<void*> targets;
    int64_t count;       // elements
    int64_t first_item;  // its items are numbered from here
  };
  void run(const Span& span, int64_t begin, int64_t end) const;

  std::vector<Span> spans_;
  bool small_ = false;
  ReduceKernel kernel_ = nullptr;
  int64_t element_bytes_ = 1, elements_per_item_ = 1, total_ = 0;
};

}  // namespace yoke::comm
