// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/shares.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "yoke/base/error.h"

namespace yoke::parallel {

std::vector<int64_t> divide(int64_t batch, const std::vector<double>& shares) {
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<int64_t> counts;
  std::vector<std::pair<double, size_t>> remainders;  // largest first, then by rank
  int64_t left = batch;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double exact = double(batch) * shares[i] / total;
    counts.push_back(int64_t(std::floor(exact)));
    remainders.emplace_back(std::floor(exact) - exact, i);
    left -= counts.back();
  }
  std::ranges::sort(remainders);
  for (size_t i = 0; left > 0; ++i, --left) ++counts[remainders[i % remainders.size()].second];
  return counts;
}

Shares::Shares(const comm::Communicator& comm, std::vector<double> shares)
    : comm_(comm), shares_(std::move(shares)) {
  if (shares_.empty()) shares_.assign(size_t(comm_.size()), 1.0);
  if (int(shares_.size()) != comm_.size())
    fail(Kind::Usage, "shares wants one number for each of the ", comm_.size(), " ranks, got ",
         shares_.size());
  for (const double share : shares_)
    if (!(share > 0 && std::isfinite(share)))
      fail(Kind::Usage, "a share is a number above 0, got ", share);
}

Shares Shares::automatic(const comm::Communicator& comm, int steps) {
  Shares shares(comm);
  shares.to_measure_ = steps;
  return shares;
}

std::pair<int64_t, int64_t> Shares::part(int64_t batch) const {
  const auto counts = divide(batch, shares_);
  const auto mine = counts.begin() + comm_.rank();
  const int64_t begin = std::accumulate(counts.begin(), mine, int64_t{0});
  return {begin, begin + *mine};
}

void Shares::report(int64_t samples, Duration time) {
  if (to_measure_ == 0) return;
  if (num_reported_++ > 0) {
    samples_ += double(samples);
    seconds_ += std::chrono::duration<double>(time).count();
  }
  if (num_reported_ <= to_measure_) return;
  to_measure_ = 0;
  const bool on_cpu = comm_.capabilities().cpu;
  const auto kind = at::device(on_cpu ? at::kCPU : at::kCUDA).dtype(at::kDouble);
  // A rank that had no sample in all this time gets a small share.
  const double speed = std::max(samples_, 0.1) / std::max(seconds_, 1e-9);
  const at::Tensor all = at::empty({comm_.size()}, kind), mine = at::full({1}, speed, kind);
  comm_.all_gather(all, mine).wait();
  const at::Tensor speeds = all.cpu();
  for (int r = 0; r < comm_.size(); ++r) shares_[size_t(r)] = speeds[r].item<double>();
}

}  // namespace yoke::parallel
