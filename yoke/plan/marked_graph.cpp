// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/marked_graph.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace yoke::plan {

MarkedGraph::MarkedGraph(size_t num_vertices, const std::vector<Edge>& edges)
    : edges_(edges.size()), first_(num_vertices + 1, 0), waits_(num_vertices, 0) {
  for (const auto& edge : edges) {
    ++first_[size_t(edge.from) + 1];
    waits_[size_t(edge.to)] += !edge.later;
  }
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  auto next = first_;
  for (const auto& edge : edges) edges_[next[size_t(edge.from)]++] = edge;
  order_.reserve(num_vertices);
  for (size_t v = 0; v < num_vertices; ++v)
    if (waits_[v] == 0) order_.push_back(int(v));
  for (size_t k = 0; k < order_.size(); ++k)
    each_edge(order_[k], [&](const Edge& edge) {
      if (!edge.later && --waits_[size_t(edge.to)] == 0) order_.push_back(edge.to);
    });
}

std::vector<const MarkedGraph::Edge*> MarkedGraph::circle() const {
  if (order_.size() == waits_.size()) return {};
  // All that is left waits for something that is left: going back, a circle is found.
  std::vector<int> back(waits_.size(), -1);
  for (const auto& edge : edges_)
    if (!edge.later && waits_[size_t(edge.from)] > 0 && waits_[size_t(edge.to)] > 0)
      back[size_t(edge.to)] = edge.from;
  auto v = int(std::ranges::find_if(waits_, [](int n) { return n > 0; }) - waits_.begin());
  std::vector<char> seen(waits_.size(), false);
  while (!std::exchange(seen[size_t(v)], true)) v = back[size_t(v)];
  std::vector<int> through;
  do {
    through.push_back(v);
    v = back[size_t(v)];
  } while (v != through[0]);
  std::vector<const Edge*> best;
  for (size_t k = 0; k < through.size(); k += 1 + through.size() / 16)
    if (auto found = shortest(through[k]); best.empty() || found.size() < best.size())
      best = std::move(found);
  return best;
}

std::vector<const MarkedGraph::Edge*> MarkedGraph::shortest(int from) const {
  std::vector<const Edge*> by(waits_.size(), nullptr);
  std::vector<int> reached{from};
  for (size_t k = 0; !by[size_t(from)] && k < reached.size(); ++k)
    each_edge(reached[k], [&](const Edge& edge) {
      if (edge.later || waits_[size_t(edge.to)] == 0 || by[size_t(edge.to)]) return;
      by[size_t(edge.to)] = &edge;
      reached.push_back(edge.to);
    });
  std::vector<const Edge*> path;
  for (int v = from; path.empty() || v != from; v = path.back()->from)
    path.push_back(by[size_t(v)]);
  return path;
}

std::vector<int64_t> MarkedGraph::greatest(const std::vector<int64_t>& marks,
                                           int64_t per_round) const {
  const size_t num = waits_.size();
  std::vector<int64_t> result(2 * num, -1);
  for (const bool second : {false, true})
    for (const int v : order_) {
      int64_t& here = result[size_t(v) + (second ? num : 0)];
      if (const int64_t mark = marks[size_t(v)]; mark >= 0)
        here = std::max(here, mark + (second ? per_round : 0));
      each_edge(v, [&](const Edge& edge) {
        if (second && edge.later) return;
        int64_t& there = result[size_t(edge.to) + (second || edge.later ? num : 0)];
        there = std::max(there, here);
      });
    }
  return result;
}

}  // namespace yoke::plan
