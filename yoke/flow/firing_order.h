// SPDX-License-Identifier: Apache-2.0
// In which order those who take values from each other fire in a round: again and again as they
// were declared, whoever has what it takes. Plain values; Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace yoke::flow {

struct FiringLink {
  int from = -1, to = -1;        // places; -1: somebody outside
  int64_t gives = 1, takes = 1;  // values in a firing
  int64_t held = 0;              // values that are there before
};

// Places, each as often as `firings` says. Who cannot fire for want of values comes last, as it was
// declared. `after`: who must be done before, by place; -1: nobody.
std::vector<size_t> firing_order(std::vector<int64_t> firings, const std::vector<FiringLink>& links,
                                 const std::vector<int>& after);

}  // namespace yoke::flow
