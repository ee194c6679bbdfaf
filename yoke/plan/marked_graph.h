// SPDX-License-Identifier: Apache-2.0
// A marked graph (Commoner et al., 1971) of something that is done in rounds: vertices are moments
// of a round, an edge says that a moment waits for another of the same round, or of the round
// before if it carries a token. Every moment comes again and again exactly if no circle is free of
// tokens. For prove.h, which says what the edges mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "yoke/plan/prove.h"

namespace yoke::plan {

class MarkedGraph {
 public:
  struct Edge {
    int from, to;
    Rule rule;    // Data also for the order of a queue
    int channel;  // -1: not of one
    bool later;   // carries a token: from a round to the next
  };
  MarkedGraph(size_t num_vertices, const std::vector<Edge>& edges);

  // Vertices as they can happen; not all of them where there is a circle.
  const std::vector<int>& order() const { return order_; }
  // A short one without tokens, against its direction: each edge begins where the next one ends.
  // Empty: there is none.
  std::vector<const Edge*> circle() const;
  // For each vertex of a round, then of the next: the greatest mark of the vertices that come
  // before it or are it. Marks of the second round are greater by `per_round`; -1: has none.
  std::vector<int64_t> greatest(const std::vector<int64_t>& marks, int64_t per_round) const;

 private:
  template <typename Fn>
  void each_edge(int from, Fn fn) const {
    for (size_t e = first_[size_t(from)]; e < first_[size_t(from) + 1]; ++e) fn(edges_[e]);
  }
  std::vector<const Edge*> shortest(int from) const;  // through a vertex that is on one

  std::vector<Edge> edges_;    // by where they come from
  std::vector<size_t> first_;  // of a vertex, in edges_
  std::vector<int> waits_;     // how many edges keep a vertex from happening
  std::vector<int> order_;
};

}  // namespace yoke::plan
