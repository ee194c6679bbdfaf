// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/gradients.h"

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/place.h"

namespace yoke::flow {
namespace {

bool floating(const Port& port) {
  using plan::Type;
  return !port.declared || port.port.type == Type::Fp16 || port.port.type == Type::Fp32 ||
         port.port.type == Type::Fp64 || port.port.type == Type::Bf16;
}

// Why gradients cannot cross the edge; empty: they can.
std::string obstacle(const Graph& graph, const std::vector<Body>& bodies, const Edge& edge) {
  const auto& from = graph.nodes()[size_t(edge.from)];
  const auto& to = graph.nodes()[size_t(edge.to)];
  if (edge.options.policy != Policy::Block) return "its policy loses values";
  if (edge.options.staleness > 0) return "its values are of earlier rounds";
  if (edge.options.every > 1) return "its values are not of every round";
  if (from.region >= 0 || to.region >= 0) return "it is in a loop or branch";
  if (!floating(from.outputs[size_t(edge.from_port)]) || !floating(to.inputs[size_t(edge.to_port)]))
    return "its values are whole numbers";
  if (to.options.role == Role::Infer && to.options.loss.empty() &&
      !bodies[size_t(edge.to)].weights.empty())
    return cat("'", to.name, "' has role = infer; role = frozen lets them pass its weights");
  return {};
}

// The first edge after the node that lets no gradients through, or that there is none.
std::string stop_of(const Graph& graph, const std::vector<Body>& bodies,
                    const std::vector<bool>& open, int node) {
  std::vector<int> reached{node};
  for (size_t at = 0; at < reached.size(); ++at)
    for (size_t i = 0; i < open.size(); ++i) {
      const auto& edge = graph.edges()[i];
      if (edge.from != reached[at]) continue;
      const auto why = obstacle(graph, bodies, edge);
      if (!open[i])
        return cat("edge '", edge_name(graph, edge),
                   "' lets no gradients through: ", why.empty() ? "gradients = false" : why);
      if (std::ranges::count(reached, edge.to) == 0) reached.push_back(edge.to);
    }
  return "give an output of a node after it as `loss`, or it another role";
}

}  // namespace

Gradients find_gradients(const Graph& graph, const std::vector<Body>& bodies) {
  const auto& nodes = graph.nodes();
  const auto& edges = graph.edges();
  Gradients out;
  std::vector<bool> open(edges.size());
  for (size_t i = 0; i < edges.size(); ++i)
    open[i] =
        edges[i].options.gradients.value_or(true) && obstacle(graph, bodies, edges[i]).empty();
  // From what is trained downwards, from losses upwards, until nothing changes.
  std::vector<bool> from_trained(nodes.size()), to_loss(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    from_trained[i] = nodes[i].options.role == Role::Train;
    to_loss[i] = !nodes[i].options.loss.empty();
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < edges.size(); ++i) {
      if (!open[i]) continue;
      const auto from = size_t(edges[i].from), to = size_t(edges[i].to);
      if (from_trained[from] && !from_trained[to]) from_trained[to] = changed = true;
      if (to_loss[to] && !to_loss[from]) to_loss[from] = changed = true;
    }
  }
  out.carried.resize(edges.size());
  out.trains.resize(nodes.size());
  for (size_t i = 0; i < edges.size(); ++i) {
    const auto from = size_t(edges[i].from), to = size_t(edges[i].to);
    out.carried[i] = open[i] && from_trained[from] && to_loss[to];
    if (edges[i].options.gradients.value_or(false) && !out.carried[i]) {
      const auto why = obstacle(graph, bodies, edges[i]);
      fail(Kind::Config, "edge '", edge_name(graph, edges[i]), "' is to carry gradients, and ",
           !why.empty()          ? why
           : !from_trained[from] ? "nothing before it is trained"
                                 : "no loss comes after it");
    }
    if (!out.carried[i]) continue;
    const auto& why = bodies[to].without_gradients;
    if (!why.empty())
      fail(Kind::Config, "node '", nodes[to].name, "' is in the path of gradients from '",
           nodes[from].name, "' and lets none through: ", why,
           "; use TorchScript, or gradients = false on edge '", edge_name(graph, edges[i]), "'");
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    const bool trained = nodes[i].options.role == Role::Train;
    if (trained && !to_loss[i])
      fail(Kind::Config, "node '", nodes[i].name,
           "' is to be trained, and none of its edges leads ", "to a loss; ",
           stop_of(graph, bodies, open, int(i)));
    if (trained && nodes[i].region >= 0)
      fail(Kind::Config, "node '", nodes[i].name,
           "' is to be trained, and is in a loop or branch, ", "where gradients do not go");
    out.trains[i] = from_trained[i] && to_loss[i];
  }
  // Backwards: a node after all whose gradients it gets, and not before their phase.
  for (const auto& node : nodes) out.phase.push_back(node.options.phase);
  std::vector<int> waits(nodes.size());
  for (size_t i = 0; i < edges.size(); ++i) waits[size_t(edges[i].from)] += out.carried[i];
  std::vector<bool> done(nodes.size());
  for (bool found = true; found;) {
    found = false;
    for (int i = int(nodes.size()) - 1; i >= 0; --i) {
      const auto at = size_t(i);
      if (done[at] || waits[at] > 0 || !out.trains[at]) continue;
      done[at] = found = true;
      out.order.push_back(i);
      for (size_t k = 0; k < edges.size(); ++k) {
        if (!out.carried[k] || edges[k].to != i) continue;
        --waits[size_t(edges[k].from)];
        out.phase[size_t(edges[k].from)] =
            std::max(out.phase[size_t(edges[k].from)], out.phase[at]);
      }
    }
  }
  // Whose weights others train too, steps when they are done.
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto& options = nodes[i].options;
    if (options.weights_of.empty()) continue;
    int owner = int(i);
    while (!nodes[size_t(owner)].options.weights_of.empty())
      owner = graph.find(nodes[size_t(owner)].options.weights_of);
    const int step = out.phase[size_t(owner)];
    if (nodes[size_t(owner)].options.role == Role::Train && out.trains[i] &&
        options.phase <= step && step < out.phase[i])
      fail(Kind::Config, "node '", nodes[i].name, "' computes in phase ", options.phase,
           " and its gradients come in phase ", out.phase[i], ", and between the two '",
           nodes[size_t(owner)].name, "' changes their weights; give it phase = ", step + 1);
    if (options.role != Role::Train) continue;
    if (nodes[size_t(owner)].options.role != Role::Train)
      fail(Kind::Config, "node '", nodes[i].name, "' trains the weights of '",
           nodes[size_t(owner)].name, "', which must have role = train itself");
    if (out.phase[size_t(owner)] < out.phase[i])
      fail(Kind::Config, "node '", nodes[i].name, "' trains the weights of '",
           nodes[size_t(owner)].name, "', which steps in an earlier phase");
  }
  for (size_t i = 0; i < nodes.size(); ++i)  // in a circle: the proof tells
    if (out.trains[i] && !done[i]) out.order.push_back(int(i));
  return out;
}

}  // namespace yoke::flow
