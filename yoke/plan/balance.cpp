// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "yoke/base/error.h"

namespace yoke::plan {

std::vector<int> balance(const std::vector<double>& costs, int parts) {
  const int layers = int(costs.size());
  if (parts < 1 || layers < parts)
    fail(Kind::Usage, layers, " layers cannot be cut into ", parts,
         " stages: each wants at least 1");
  std::vector<double> before(costs.size() + 1, 0);
  for (size_t i = 0; i < costs.size(); ++i) {
    if (!(costs[i] >= 0) || !std::isfinite(costs[i]))
      fail(Kind::Usage, "the cost of layer ", i, " is ", costs[i],
           "; a number from 0 on is wanted");
    before[i + 1] = before[i] + costs[i];
  }
  // dearest[n]: of the first n layers in so many parts; cut[k][n]: where the last of them begins.
  std::vector<double> dearest = before;
  std::vector<std::vector<int>> cut(size_t(parts), std::vector<int>(costs.size() + 1, 0));
  for (int k = 1; k < parts; ++k) {
    std::vector<double> next(costs.size() + 1, std::numeric_limits<double>::infinity());
    for (int n = k + 1; n <= layers; ++n)
      for (int c = k; c < n; ++c) {
        const double worst = std::max(dearest[size_t(c)], before[size_t(n)] - before[size_t(c)]);
        if (worst < next[size_t(n)]) next[size_t(n)] = worst, cut[size_t(k)][size_t(n)] = c;
      }
    dearest = std::move(next);
  }
  std::vector<int> result(static_cast<size_t>(parts));
  for (int k = parts - 1, end = layers; k >= 0; --k) {
    const int begin = cut[size_t(k)][size_t(end)];
    result[size_t(k)] = end - begin;
    end = begin;
  }
  return result;
}

}  // namespace yoke::plan
