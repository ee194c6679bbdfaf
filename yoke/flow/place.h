// SPDX-License-Identifier: Apache-2.0
// Which device each node is on, and how often it fires in a round.
#pragma once

#include <map>

#include "yoke/flow/graph.h"

namespace yoke::flow {

// Pinned nodes where they are pinned, those that belong together together, the rest beside what
// feeds them or where there is least. Throws Kind::Config where that cannot be.
std::vector<int> place(const Graph& graph);
// The least numbers by which every edge is given as many values as are taken from it.
std::vector<int64_t> firings_of(const Graph& graph);
// Bytes of weights on each device, with gradients and the optimizer's state where they are trained.
std::vector<uint64_t> memory_of(const Graph& graph, const std::vector<int>& queue_of,
                                const std::vector<Body>& bodies);
// What devices have left; 0: not known. To be asked before anything is opened on them.
std::map<topo::Device, uint64_t> free_memory(const Graph& graph);
// Throws Kind::Config where a device has less.
void check_memory(const Graph& graph, const std::map<topo::Device, uint64_t>& free,
                  const std::vector<uint64_t>& needed);
// How its values travel. Throws Kind::Config where they cannot as was asked.
Transport transport_of(const Graph& graph, const std::vector<int>& queue_of, const Edge& edge);
at::Device device_of(const topo::Device& device);             // as LibTorch has it
std::string edge_name(const Graph& graph, const Edge& edge);  // "a.y -> b.x"

}  // namespace yoke::flow
