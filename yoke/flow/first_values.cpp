// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/first_values.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/place.h"
#include "yoke/models/port.h"

namespace yoke::flow {

namespace {

struct First {
  std::vector<int64_t> shape = {};
  at::ScalarType type = at::kFloat;
};

First first_of(const Compiled& compiled, const Edge& edge) {
  const auto& giver = compiled.graph.nodes()[size_t(edge.from)];
  const auto& taker = compiled.graph.nodes()[size_t(edge.to)];
  const auto& from = giver.outputs[size_t(edge.from_port)];
  const auto& to = taker.inputs[size_t(edge.to_port)];
  const auto& port = to.declared ? to : from;
  auto shape = edge.options.initial_shape;
  if (shape.empty() && port.declared) shape = port.port.sizes();
  if ((shape.empty() && !port.declared) ||
      std::ranges::any_of(shape, [](int64_t size) { return size < 0; }))
    fail(Kind::Config, "edge '", edge_name(compiled.graph, edge), "' has values before the first ",
         "round, and nobody says of what shape; give initial_shape = [...]");
  for (const auto& [end, node] : {std::pair(&to, &taker), std::pair(&from, &giver)})
    if (end->declared && !end->port.holds(end->port.type, shape))
      fail(Kind::Config, "edge '", edge_name(compiled.graph, edge), "': initial_shape is ",
           at::IntArrayRef(shape), ", and port '", node->name, ".", end->port.name, "' is ",
           end->port.wanted(), "; give a shape that it holds",
           end->port.has_rows() ? "" : ", or none");
  return {std::move(shape), port.declared ? models::dtype_of(port.port.type) : at::kFloat};
}

}  // namespace

// What an edge holds before the first round.
at::Tensor initial_value(const Compiled& compiled, const Edge& edge) {
  const auto first = first_of(compiled, edge);
  return at::full(first.shape, edge.options.initial, first.type);
}

namespace {

void check_exchange(const Compiled& compiled, const Exchange& exchange) {
  const auto name = [&](int node) { return compiled.graph.nodes()[size_t(node)].name; };
  const auto first = compiled.bodies[size_t(exchange.nodes[0])].state();
  for (const int node : exchange.nodes) {
    const auto& body = compiled.bodies[size_t(node)];
    if (body.weights.empty())
      fail(Kind::Config, "exchange '", exchange.name, "': node '", name(node), "' has no weights");
    const bool alike = std::ranges::equal(body.state(), first, [](const auto& a, const auto& b) {
      return a.sizes() == b.sizes() && a.dtype() == b.dtype();
    });
    if (!alike)
      fail(Kind::Config, "exchange '", exchange.name, "': nodes '", name(exchange.nodes[0]),
           "' and '", name(node),
           "' have weights of different shapes; only equal models trade them");
  }
}

}  // namespace

void check_first_values(const Compiled& compiled, const std::map<topo::Device, uint64_t>& free) {
  const auto& graph = compiled.graph;
  const auto& devices = graph.options().devices;
  // An edge holds so many values from the first round to the last, where its giver is.
  std::map<topo::Device, double> needed;
  const auto weights = memory_of(graph, compiled.queue_of, compiled.bodies);
  for (size_t i = 0; i < devices.size(); ++i) needed[devices[i]] += double(weights[i]);
  for (const auto& edge : graph.edges()) {
    if (edge.options.staleness == 0 && edge.options.policy == Policy::Block) continue;
    const auto first = first_of(compiled, edge);
    const auto& port = graph.nodes()[size_t(edge.from)].outputs[size_t(edge.from_port)];
    const double count =
        std::max(1.0, double(edge.options.staleness) * double(compiled.firings[size_t(edge.from)]) *
                          double(port.tokens));
    double bytes = count * double(c10::elementSize(first.type));
    for (const int64_t size : first.shape) bytes *= double(size);
    const auto& device = devices[size_t(compiled.queue_of[size_t(edge.from)])];
    const uint64_t has = free.at(device);
    if ((needed[device] += bytes) <= double(has) || has == 0) continue;
    fail(Kind::Config, "edge '", edge_name(graph, edge), "' begins with ", count, " values of ",
         at::IntArrayRef(first.shape), ", ", bytes_text(uint64_t(std::min(bytes, 1e19))),
         " in all, and with what is there before them ", topo::to_text(device), " has ",
         bytes_text(has), graph.options().memory_gb > 0 ? " (flow.memory_gb)" : "",
         "; give it less staleness, or smaller values");
  }
  for (const auto& exchange : graph.exchanges()) check_exchange(compiled, exchange);
}

}  // namespace yoke::flow
