// SPDX-License-Identifier: Apache-2.0
// Which device each node is on, and how often it fires in a round.
#pragma once

#include <map>

#include "yoke/flow/graph.h"

namespace yoke::flow {

// Pinned nodes where they are pinned, those that belong together together, the rest beside what
// feeds them or where there are fewest. Throws Kind::Config where that cannot be. With what each
// node needs: nodes with weights where there are fewest bytes, and no device gets more than it has
// left, unless there is no such way.
std::vector<int> place(const Graph& graph, const std::vector<uint64_t>& needs = {},
                       const std::map<topo::Device, uint64_t>& free = {});
// The least numbers by which every edge is given as many values as are taken from it.
std::vector<int64_t> firings_of(const Graph& graph);
// Bytes of a node's weights, with gradients and the optimizer's state where they are trained.
uint64_t need_of(const NodeOptions& options, const Body& body);
// Their sums, by place.
std::vector<uint64_t> memory_of(const Graph& graph, const std::vector<int>& queue_of,
                                const std::vector<Body>& bodies);
// What devices have left; 0: not known. To be asked before anything is opened on them.
std::map<topo::Device, uint64_t> free_memory(const Graph& graph);
bool fits(const Graph& graph, const std::map<topo::Device, uint64_t>& free,
          const std::vector<uint64_t>& needed);
// Throws Kind::Config where a device has less.
void check_memory(const Graph& graph, const std::map<topo::Device, uint64_t>& free,
                  const std::vector<uint64_t>& needed);
// How its values travel. Throws Kind::Config where they cannot as was asked.
Transport transport_of(const Graph& graph, const std::vector<int>& queue_of, const Edge& edge);
at::Device device_of(const topo::Device& device);             // as LibTorch has it
std::string edge_name(const Graph& graph, const Edge& edge);  // "a.y -> b.x"

}  // namespace yoke::flow
