// SPDX-License-Identifier: Apache-2.0
// Which edges of a graph carry gradients back, and in which order: an edge does from what is
// trained (or what comes from it) to what ends in a loss.
#pragma once

#include "yoke/flow/graph.h"

namespace yoke::flow {

struct Gradients {
  std::vector<bool> carried = {};  // by edge
  std::vector<bool> trains = {};   // by node: it keeps what backward needs
  std::vector<int> order = {};     // nodes that have a backward, in its order
  std::vector<int> phase = {};     // by node: of its backward and step, else its own
};
// Throws Kind::Config by name: what would be trained and is not reached, what gradients cannot
// cross.
Gradients find_gradients(const Graph& graph, const std::vector<Body>& bodies);

}  // namespace yoke::flow
