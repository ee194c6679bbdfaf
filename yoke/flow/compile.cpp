// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/compile.h"

#include <algorithm>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/flow/first_values.h"
#include "yoke/flow/lower.h"
#include "yoke/flow/place.h"
#include "yoke/flow/shapes.h"

namespace yoke::flow {
namespace {

// Ports that were not declared are as the file says, if it does.
void learn(std::vector<Port>& ports, const std::vector<plan::Port>& known,
           const std::string& node) {
  if (known.size() != ports.size()) return;
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].declared || ports[i].tokens != 1) continue;
    const std::string name = ports[i].port.name;
    ports[i].port = known[i];
    ports[i].port.name = name;
    for (auto& size : ports[i].port.shape)
      if (!size.name.empty()) size.name = cat(node, ".", size.name);
    ports[i].declared = true;
  }
}

// What a pattern has put in comes when the last of what it takes does.
void settle_phases(Graph& graph) {
  auto& nodes = graph.mutable_nodes();
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& edge : graph.edges()) {
      auto& to = nodes[size_t(edge.to)];
      const int phase = nodes[size_t(edge.from)].options.phase;
      const bool later = edge.options.staleness == 0 && edge.options.policy == Policy::Block;
      if (to.what.empty() || !later || edge.carried || to.options.phase >= phase) continue;
      to.options.phase = phase;
      moved = true;
    }
  }
  std::vector<const Node*> first(graph.regions().size());
  for (const auto& node : nodes)
    for (int at = node.region; at >= 0; at = graph.regions()[size_t(at)].parent) {
      auto& other = first[size_t(at)];
      if (!other) other = &node;
      if (other->options.phase != node.options.phase)
        fail(yoke::Kind::Config, "'", graph.regions()[size_t(at)].name, "' has nodes of phases ",
             other->options.phase, " ('", other->name, "') and ", node.options.phase, " ('",
             node.name, "'); a loop or branch is of one phase");
    }
}

// What is suggested of a channel, in the keys of the edge that it is of; empty: it is of none.
std::string keys_of(const Compiled& compiled, const plan::Suggestion& suggestion) {
  const auto& part = *plan::with_parts(compiled.program)[size_t(suggestion.part + 1)];
  std::string name = part.channels[size_t(suggestion.channel)].name;
  name = name.substr(0, name.find(" (to send)"));
  for (const auto& edge : compiled.graph.edges()) {
    if (edge_name(compiled.graph, edge) != name) continue;
    const int64_t held = suggestion.value, capacity = edge.options.capacity;
    if (suggestion.kind == plan::Suggestion::Kind::Capacity)
      return cat("on that edge: capacity = ", held);
    if (suggestion.part >= 0) return {};  // no rounds, no delay
    const int64_t a_round =
        compiled.firings[size_t(edge.from)] *
        compiled.graph.nodes()[size_t(edge.from)].outputs[size_t(edge.from_port)].tokens;
    const int64_t staleness = (held + a_round - 1) / a_round;
    return cat("on that edge: staleness = ", staleness,
               capacity > 0 && capacity < staleness * a_round
                   ? cat(" and capacity = ", staleness * a_round)
                   : "",
               ", with initial and initial_shape for the first round");
  }
  return {};
}

// Where another place in a row means another phase.
std::string phases_of(const Compiled& compiled, const plan::Suggestion& suggestion) {
  if (suggestion.part >= 0) return {};
  std::set<int> phases;
  for (const auto& node : compiled.graph.nodes()) phases.insert(node.options.phase);
  auto numbered = compiled.program;
  auto& row = numbered.rows[size_t(suggestion.queue)];
  for (size_t i = 0; i < row.size(); ++i) row[i].name = std::to_string(i);
  numbered = plan::apply(std::move(numbered), suggestion);
  std::vector<std::string> cures;
  auto phase = phases.begin();
  for (const auto& operation : numbered.rows[size_t(suggestion.queue)]) {
    const auto& task = compiled.tasks.rows[size_t(suggestion.queue)][std::stoul(operation.name)];
    if (task.kind == Task::Kind::Barrier) ++phase;
    if (task.kind != Task::Kind::Forward) continue;
    const auto& node = compiled.graph.nodes()[size_t(task.node)];
    if (node.options.phase != *phase)
      cures.push_back(cat("phase = ", *phase, " in node '", node.name, "'"));
  }
  return join(cures, ", ");
}

Body open_body(const Compiled& out, size_t i) {
  const auto& node = out.graph.nodes()[i];
  if (!node.open || !node.options.weights_of.empty()) return {};
  try {
    return node.open(device_of(out.graph.options().devices[size_t(out.queue_of[i])]));
  } catch (const Error& error) {
    fail(error.kind(), "node '", node.name, "': ", error.what());
  } catch (const std::exception& error) {
    fail(yoke::Kind::Config, "node '", node.name, "' cannot be opened: ", comm::text_of(error));
  }
}

// The node after those that have their bodies.
void open_next(Compiled& out) {
  const size_t i = out.bodies.size();
  auto& node = out.graph.mutable_nodes()[i];
  Body body = open_body(out, i);
  if (!node.options.weights_of.empty()) {
    const int owner = out.graph.find(node.options.weights_of);
    if (owner >= int(i))
      fail(yoke::Kind::Config, "node '", node.name, "': weights_of '", node.options.weights_of,
           "' must name a node that comes before it");
    const auto& other = out.graph.nodes()[size_t(owner)];
    if (node.inputs.size() != other.inputs.size() || node.outputs.size() > other.outputs.size())
      fail(yoke::Kind::Config, "node '", node.name, "' has ", node.inputs.size(), " inputs and ",
           node.outputs.size(), " outputs, and '", other.name,
           "', with whose weights it computes, ", other.inputs.size(), " and ",
           other.outputs.size());
    body = out.bodies[size_t(owner)];
  } else if (body.set_mode) {
    body.set_mode(node.options.role == Role::Train);
  }
  learn(node.inputs, body.inputs, node.name);
  learn(node.outputs, body.outputs, node.name);
  if (body.name_outputs) {
    std::vector<std::string> names;
    for (const auto& output : node.outputs) names.push_back(output.port.name);
    body.name_outputs(names);
  }
  if (node.options.role == Role::Train && body.weights.empty())
    fail(yoke::Kind::Config, "node '", node.name, "' is to be trained and has no weights",
         body.without_gradients.empty() ? "" : cat(": ", body.without_gradients));
  if (node.copy_of >= 0) copy_weights(out.bodies[size_t(node.copy_of)], body);
  out.bodies.push_back(std::move(body));
}

}  // namespace

Compiled compile(Graph graph) {
  Compiled out{.graph = std::move(graph)};
  if (out.graph.nodes().empty()) fail(yoke::Kind::Config, "a flow wants nodes, got none");
  for (size_t i = 0; i < out.graph.nodes().size(); ++i) {
    const auto node = out.graph.nodes()[i];
    if (node.options.replicas.empty()) continue;
    out.graph.mutable_nodes()[i].options.replicas.clear();
    std::vector<std::vector<int>> devices;
    for (const int device : node.options.replicas) devices.push_back({device});
    out.graph.data_parallel(node.name + "-all", {.nodes = {node.name}, .devices = devices});
  }
  settle_phases(out.graph);
  out.queue_of = place(out.graph);
  out.firings = firings_of(out.graph);
  const auto free = free_memory(out.graph);
  const auto open_all = [&](bool again) {
    out.bodies.clear();
    for (size_t i = 0; i < out.graph.nodes().size(); ++i) {
      open_next(out);
      const auto needed = memory_of(out.graph, out.queue_of, out.bodies);
      if (again) check_memory(out.graph, free, needed);
      if (!fits(out.graph, free, needed)) return false;
    }
    return true;
  };
  // Where that does not fit, by bytes: they are known when all have been opened, one at a time.
  if (!open_all(free.size() < 2)) {
    out.bodies.clear();
    std::vector<uint64_t> needs;
    for (size_t i = 0; i < out.graph.nodes().size(); ++i)
      needs.push_back(need_of(out.graph.nodes()[i].options, open_body(out, i)));
    out.queue_of = place(out.graph, needs, free);
    open_all(true);
  }
  declare_patterns(out.graph);
  lower(out);
  check_first_values(out, free);
  return out;
}

std::optional<plan::Knot> Compiled::knot(const plan::ProveOptions& options) const {
  return plan::find_knot(program, options);
}

std::string Compiled::placement() const {
  const auto bytes = memory_of(graph, queue_of, bodies);
  std::string text;
  for (size_t queue = 0; queue < program.queues.size(); ++queue) {
    text += cat(program.queues[queue], "  ", bytes_text(bytes[queue]), "\n");
    for (size_t i = 0; i < graph.nodes().size(); ++i) {
      if (queue_of[i] != int(queue)) continue;
      const auto& node = graph.nodes()[i];
      const char* roles[] = {"infer", "train", "frozen"};
      text +=
          cat("  ", node.name,
              std::string(std::max<size_t>(1, 24 - std::min<size_t>(23, node.name.size())), ' '),
              roles[size_t(node.options.role)],
              firings[i] > 1 ? cat(", ", firings[i], " times a round") : "",
              node.what.empty() ? "" : cat("  (", node.what, ")"), "\n");
    }
  }
  return text;
}

std::vector<std::string> Compiled::warnings() const {
  std::map<topo::Device, std::vector<size_t>> drawing;
  for (size_t i = 0; i < bodies.size(); ++i)
    if (bodies[i].draws && graph.nodes()[i].options.role == Role::Train)
      drawing[graph.options().devices[size_t(queue_of[i])]].push_back(i);
  std::vector<std::string> texts;
  for (const auto& [device, nodes] : drawing) {
    const auto queue = [&](size_t node) { return queue_of[node]; };
    if (std::ranges::all_of(nodes, [&](size_t i) { return queue(i) == queue(nodes[0]); })) continue;
    std::vector<std::string> names;
    for (const size_t i : nodes) names.push_back(cat("'", graph.nodes()[i].name, "'"));
    texts.push_back(cat("nodes ", join(names, ", "), " draw (dropout) from the one generator of ",
                        topo::to_text(device), ", whoever comes first: no two runs are equal; put ",
                        "them on one place ([[colocate]]), or take the dropout out"));
  }
  return texts;
}

std::string Compiled::verdict() const {
  return plan::hangs_on_timing(program) ? "deadlock-free, not deterministic" : "deadlock-free";
}

void check(const Compiled& compiled) {
  const auto knot = compiled.knot();
  if (!knot) return;
  // The cure in the words of a flow.
  using Kind = plan::Suggestion::Kind;
  std::string cure;
  if (knot->suggestion.kind == Kind::Tokens || knot->suggestion.kind == Kind::Capacity)
    cure = keys_of(compiled, knot->suggestion);
  if (knot->suggestion.kind == Kind::Swap || knot->suggestion.kind == Kind::Move) {
    cure = phases_of(compiled, knot->suggestion);
    if (cure.empty()) cure = "their order is that of the nodes in the flow, and of their phases";
  }
  std::string text = knot->text(compiled.program);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  fail(yoke::Kind::Config, "the flow would not run: ", text,
       cure.empty() ? "" : cat("\n  (", cure, ")"));
}

}  // namespace yoke::flow
