// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/firing_order.h"

#include <algorithm>
#include <set>

namespace yoke::flow {

std::vector<size_t> firing_order(std::vector<int64_t> firings, const std::vector<FiringLink>& links,
                                 const std::vector<int>& after) {
  std::vector<int64_t> held;
  std::vector<std::vector<size_t>> takes(firings.size()), gives(firings.size());
  std::vector<std::vector<size_t>> wakes(firings.size());  // whom a firing may let go on
  for (size_t i = 0; i < links.size(); ++i) {
    const auto& link = links[i];
    held.push_back(link.held);
    if (link.to >= 0) takes[size_t(link.to)].push_back(i);
    if (link.from >= 0) gives[size_t(link.from)].push_back(i);
    if (link.from >= 0 && link.to >= 0) wakes[size_t(link.from)].push_back(size_t(link.to));
  }
  for (size_t k = 0; k < after.size(); ++k)
    if (after[k] >= 0) wakes[size_t(after[k])].push_back(k);
  const auto ready = [&](size_t k) {
    return firings[k] > 0 && (after[k] < 0 || firings[size_t(after[k])] == 0) &&
           std::ranges::all_of(takes[k], [&](size_t i) { return held[i] >= links[i].takes; });
  };
  std::vector<size_t> order;
  // Without asking those again to whom nothing has come.
  std::set<size_t> now, later;
  for (size_t k = 0; k < firings.size(); ++k) now.insert(k);
  for (; !now.empty(); now.swap(later))
    while (!now.empty()) {
      const size_t k = *now.begin();
      now.erase(now.begin());
      if (!ready(k)) continue;
      for (const size_t i : takes[k]) held[i] -= links[i].takes;
      for (const size_t i : gives[k]) held[i] += links[i].gives;
      --firings[k];
      order.push_back(k);
      later.insert(k);
      for (const size_t next : wakes[k]) (next > k ? now : later).insert(next);
    }
  for (size_t k = 0; k < firings.size(); ++k) order.insert(order.end(), size_t(firings[k]), k);
  return order;
}

}  // namespace yoke::flow
