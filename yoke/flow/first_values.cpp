// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/first_values.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/flow/place.h"
#include "yoke/models/port.h"

namespace yoke::flow {

// What an edge holds before the first round.
at::Tensor initial_value(const Compiled& compiled, const Edge& edge) {
  const auto& from = compiled.graph.nodes()[size_t(edge.from)].outputs[size_t(edge.from_port)];
  const auto& to = compiled.graph.nodes()[size_t(edge.to)].inputs[size_t(edge.to_port)];
  const auto& port = to.declared ? to : from;
  auto shape = edge.options.initial_shape;
  if (shape.empty() && port.declared) shape = port.port.sizes();
  if ((shape.empty() && !port.declared) ||
      std::ranges::any_of(shape, [](int64_t size) { return size < 0; }))
    fail(Kind::Config, "edge '", edge_name(compiled.graph, edge), "' has values before the first ",
         "round, and nobody says of what shape; give initial_shape = [...]");
  const auto dtype = port.declared ? models::dtype_of(port.port.type) : at::kFloat;
  return at::full(shape, edge.options.initial, dtype);
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

void check_first_values(const Compiled& compiled) {
  for (const auto& edge : compiled.graph.edges())
    if (edge.options.staleness > 0 || edge.options.policy != Policy::Block)
      initial_value(compiled, edge);
  for (const auto& exchange : compiled.graph.exchanges()) check_exchange(compiled, exchange);
}

}  // namespace yoke::flow
