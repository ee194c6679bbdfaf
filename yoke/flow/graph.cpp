// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/graph.h"

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::flow {
namespace {

constexpr int64_t kMostHeld = 1 << 16;  // values in one edge

// "2*x:FP32[b,4]", "x:FP32[b,4]" or "x".
Port parse(const std::string& node, const std::string& text) {
  Port port;
  const size_t star = text.find('*');
  std::string rest = star == text.npos ? text : text.substr(star + 1);
  if (star != text.npos) {
    const auto tokens = parse_int(text.substr(0, star));
    if (!tokens || *tokens < 1 || *tokens > 4096)
      fail(Kind::Config, "node '", node, "': port '", text,
           "' wants a number from 1 to 4096 before *, as 2*x");
    port.tokens = *tokens;
  }
  port.declared = rest.find(':') != rest.npos;
  if (!port.declared) {
    port.port.name = rest;
  } else {
    try {
      port.port = plan::parse_port(rest);
    } catch (const Error& error) {
      fail(Kind::Config, "node '", node, "': ", error.what());
    }
    // A size's name is the node's own: another's `b` is another size until an edge says otherwise.
    for (auto& size : port.port.shape)
      if (!size.name.empty()) size.name = cat(node, ".", size.name);
  }
  if (port.port.name.empty() || port.port.name.find_first_of(". /") != std::string::npos)
    fail(Kind::Config, "node '", node, "': port '", text, "' wants a name without dots and blanks");
  return port;
}

std::vector<Port> parse_all(const std::string& node, const std::vector<std::string>& texts) {
  std::vector<Port> ports;
  for (const auto& text : texts) {
    ports.push_back(parse(node, text));
    for (size_t i = 0; i + 1 < ports.size(); ++i)
      if (ports[i].port.name == ports.back().port.name)
        fail(Kind::Config, "node '", node, "' has two ports '", ports[i].port.name,
             "' on one side");
  }
  return ports;
}

std::string name_list(const std::vector<Port>& ports) {
  std::vector<std::string> names;
  for (const auto& port : ports) names.push_back(port.port.name);
  return join(names, ", ");
}

}  // namespace

Graph::Graph(GraphOptions options) : options_(std::move(options)) {
  if (options_.devices.empty()) fail(Kind::Config, "a flow wants at least one device");
}

int Graph::add(Node node) {
  if (node.name.empty() || node.name.find_first_of(". ") != std::string::npos)
    fail(Kind::Config, "node '", node.name, "': a name wants letters without dots and blanks");
  for (const auto& other : nodes_)
    if (other.name == node.name) fail(Kind::Config, "there are two nodes '", node.name, "'");
  const int devices = int(options_.devices.size());
  if (node.options.device >= devices || node.options.device < -1)
    fail(Kind::Config, "node '", node.name, "': device ", node.options.device,
         ", and the flow has ", devices, " (0 to ", devices - 1, "); see flow.devices");
  node.inputs = parse_all(node.name, node.options.inputs);
  node.outputs = parse_all(node.name, node.options.outputs);
  if (!node.options.loss.empty() && std::ranges::none_of(node.outputs, [&](const Port& port) {
        return port.port.name == node.options.loss;
      }))
    fail(Kind::Config, "node '", node.name, "': loss '", node.options.loss,
         "' is none of its outputs: ", name_list(node.outputs));
  nodes_.push_back(std::move(node));
  return int(nodes_.size()) - 1;
}

int Graph::node(const std::string& name, Open open, NodeOptions options) {
  // One that says nothing is a function of one value.
  if (options.inputs.empty() && options.outputs.empty()) options.inputs = {"x"};
  if (options.outputs.empty()) options.outputs = {"y"};
  if (name.find('/') != name.npos)
    fail(Kind::Config, "node '", name, "': / is for the nodes of a graph within a graph");
  if (!open) fail(Kind::Config, "node '", name, "' computes nothing; give it a model");
  return add({.name = name, .open = std::move(open), .options = std::move(options)});
}

int Graph::find(const std::string& name) const {
  const auto found = std::ranges::find(nodes_, name, &Node::name);
  if (found != nodes_.end()) return int(found - nodes_.begin());
  std::vector<std::string> names;
  for (const auto& node : nodes_) names.push_back(node.name);
  const auto close = nearest(name, names);
  fail(Kind::Config, "there is no node '", name, "'",
       close.empty() ? cat("; there are: ", join(names, ", "))
                     : cat("; did you mean ", join(close, " or "), "?"));
}

std::vector<int> Graph::find_all(const std::vector<std::string>& names) const {
  std::vector<int> found;
  for (const auto& name : names) {
    found.push_back(find(name));
    if (std::ranges::count(found, found.back()) > 1)
      fail(Kind::Config, "node '", name, "' is named twice in one list");
  }
  return found;
}

Graph::End Graph::end_of(const std::string& given, bool output) {
  std::string text = given;
  // The first port of a pattern may be meant by its name alone.
  for (const auto& key : {text, cat(text, output ? ".y" : ".x")})
    if (const auto other = also_.find(cat(output ? "<" : ">", key)); other != also_.end())
      text = other->second;
  const size_t dot = text.rfind('.');
  const int node = find(text.substr(0, dot));
  const auto& ports = output ? nodes_[size_t(node)].outputs : nodes_[size_t(node)].inputs;
  const char* side = output ? "output" : "input";
  if (dot == text.npos) {
    if (ports.empty())
      fail(Kind::Config, "node '", text, "' has no ", side,
           "; a node that says one side alone has ", "none on the other: say ", side, " = [\"",
           output ? "y" : "x", "\"] too");
    return {node, 0};
  }
  for (size_t i = 0; i < ports.size(); ++i)
    if (ports[i].port.name == text.substr(dot + 1)) return {node, int(i)};
  fail(Kind::Config, "node '", text.substr(0, dot), "' has no ", side, " '", text.substr(dot + 1),
       "'; there ", ports.empty() ? "is none" : cat("are: ", name_list(ports)));
}

void Graph::connect(End from, End to, const EdgeOptions& options) {
  const auto& a = nodes_[size_t(from.node)];
  const auto& b = nodes_[size_t(to.node)];
  const std::string name = cat(a.name, ".", a.outputs[size_t(from.port)].port.name, " -> ", b.name,
                               ".", b.inputs[size_t(to.port)].port.name);
  const auto refuse = [&](const auto&... why) {
    fail(Kind::Config, "edge '", name, "': ", why...);
  };
  if (options.capacity < 0 || options.capacity > kMostHeld)
    refuse("capacity ", options.capacity, ", wanted 1 to ", kMostHeld,
           ", or 0 for as many as suit");
  if (options.every < 1) refuse("every ", options.every, ", wanted at least 1");
  if (options.staleness < 0 || options.staleness > kMostHeld)
    refuse("staleness ", options.staleness, ", wanted 0 to ", kMostHeld);
  if (options.policy != Policy::Block) {
    if (options.gradients.value_or(false))
      refuse("latest and drop lose values, and gradients may not be lost; use policy = block");
    if (options.transport == Transport::Send)
      refuse("latest and drop want an edge that nobody waits at; send has two ends that wait");
    if (options.every > 1 || options.staleness > 0)
      refuse("every and staleness say which value comes; latest and drop leave it to chance");
  }
  if (options.gradients.value_or(false) && (options.staleness > 0 || options.every > 1))
    refuse("gradients cross an edge in the round of their values; staleness and every go with ",
           "gradients = false");
  for (const auto& edge : edges_)
    if (edge.to == to.node && edge.to_port == to.port && !edge.carried)
      refuse("the input has an edge already, from '", nodes_[size_t(edge.from)].name, "'");
  edges_.push_back({.from = from.node,
                    .from_port = from.port,
                    .to = to.node,
                    .to_port = to.port,
                    .options = options});
}

void Graph::edge(const std::string& from, const std::string& to, EdgeOptions options) {
  connect(end_of(from, true), end_of(to, false), options);
}

void Graph::input(const std::string& port, const std::vector<std::string>& to, int device) {
  const std::string name = port.substr(0, port.find(':'));
  Node node{.name = name, .options = {.device = device, .outputs = {port}}, .feeds = name};
  node.what = "input";
  const int added = add(std::move(node));
  for (const auto& end : to) connect({added, 0}, end_of(end, false), {});
}

void Graph::output(const std::string& port, const std::string& from, int device) {
  const std::string name = port.substr(0, port.find(':'));
  const auto end = end_of(from, true);
  if (device < 0) device = nodes_[size_t(end.node)].options.device;
  Node node{.name = name, .options = {.device = device, .inputs = {port}}, .gives = name};
  node.what = "output";
  connect(end, {add(std::move(node)), 0}, {});
}

void Graph::colocate(const std::vector<std::string>& nodes) {
  together_.push_back(find_all(nodes));
}
void Graph::separate(const std::vector<std::string>& nodes) { apart_.push_back(find_all(nodes)); }

Graph Graph::on_first_device() const {
  Graph graph = *this;
  graph.options_.devices.resize(1);
  graph.apart_.clear();
  for (auto& node : graph.nodes_) {
    node.options.device = 0;
    std::ranges::fill(node.options.replicas, 0);
    node.within.clear();
  }
  return graph;
}

}  // namespace yoke::flow
