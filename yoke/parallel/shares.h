// SPDX-License-Identifier: Apache-2.0
// How a batch is divided among ranks of unequal speed. The gradient does not depend on it (see
// DataParallel::backward), only the time of a step.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/comm/communicator.h"

namespace yoke::parallel {

// Whole samples in proportion to the shares, the largest remainders first; adds up to `batch`.
std::vector<int64_t> divide(int64_t batch, const std::vector<double>& shares);

class Shares {
 public:
  // One number above 0 for each rank, in any unit; empty: equal.
  explicit Shares(const comm::Communicator& comm, std::vector<double> shares = {});
  // Finds them out: equal until every rank has reported `steps` steps, then in proportion to the
  // speeds. The first step is not counted.
  static Shares automatic(const comm::Communicator& comm, int steps = 3);

  // This rank's samples of a batch, [first, second).
  std::pair<int64_t, int64_t> part(int64_t batch) const;
  const std::vector<double>& values() const { return shares_; }
  // Collective while shares are being found out, else free: what this rank has done in a step, and
  // the time it took without waiting for others.
  void report(int64_t samples, Duration time);

 private:
  comm::Communicator comm_;
  std::vector<double> shares_;
  int to_measure_ = 0;  // steps
  int num_reported_ = 0;
  double samples_ = 0, seconds_ = 0;
};

}  // namespace yoke::parallel
