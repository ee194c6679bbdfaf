// SPDX-License-Identifier: Apache-2.0
// The patterns, each as nodes and edges of the one kind.
#include <algorithm>
#include <set>
#include <tuple>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/graph.h"
#include "yoke/flow/words.h"

namespace yoke::flow {
namespace {

void want(bool right, const std::string& pattern, const auto&... what) {
  if (!right) fail(Kind::Config, "'", pattern, "': ", what...);
}

}  // namespace

void Graph::ensemble(const std::string& name, const std::string& input, const Ensemble& options) {
  const size_t count = options.nodes.size();
  want(count > 0, name, "an ensemble wants nodes");
  want(options.merge != "weighted" || options.weights.size() == count, name,
       "weighted wants a weight for each of its ", count, " nodes, got ", options.weights.size());
  std::set<std::pair<int, int>> ends;
  for (const auto& node : options.nodes) {
    const End end = end_of(node, true);
    want(ends.insert({end.node, end.port}).second, name, "node '", node, "' is named twice");
  }
  const std::set<std::string> words{"mean", "vote", "stack", "weighted", "concat"};
  int merge = -1;
  if (words.contains(options.merge)) {
    merge = add(
        {.name = name,
         .open = joins(options.merge, options.weights),
         .options = {.device = options.device, .inputs = numbered("x", count), .outputs = {"y"}},
         .what = options.merge});
  } else {  // one of the user's
    want(std::ranges::count(nodes_, options.merge, &Node::name) > 0, name,
         "merge = ", options.merge, " is neither one of ", join({words.begin(), words.end()}, ", "),
         " nor a node");
    merge = find(options.merge);
    want(nodes_[size_t(merge)].inputs.size() >= count, name, "node '", options.merge, "' wants ",
         count, " inputs to merge so many, got ", nodes_[size_t(merge)].inputs.size());
    also_[cat("<", name, ".y")] = options.merge;
  }
  const EdgeOptions way{.capacity = options.edge.capacity,
                        .transport = options.edge.transport,
                        .gradients = options.edge.gradients};
  for (size_t i = 0; i < count; ++i) {
    if (!input.empty()) connect(end_of(input, true), end_of(options.nodes[i], false), way);
    connect(end_of(options.nodes[i], true), {merge, int(i)}, options.edge);
  }
}

void Graph::chain(const std::vector<std::string>& nodes, EdgeOptions options) {
  for (size_t i = 0; i + 1 < nodes.size(); ++i) edge(nodes[i], nodes[i + 1], options);
}

void Graph::exchange(const std::string& name, const Trade& options) {
  const size_t count = options.from.size();
  want(count >= 2 && options.into.size() == count, name,
       "an exchange wants two or more outputs and as many inputs, got ", count, " and ",
       options.into.size());
  want(!options.edge.gradients.value_or(false), name,
       "no gradients cross an exchange; trade them by what = gradients, or give by an edge");
  auto given = options.edge;
  given.gradients = false;
  for (size_t i = 0; i < count; ++i) {
    if (options.ring) {
      edge(options.from[(i + count - 1) % count], options.into[i], given);
      continue;
    }
    // What all the others gave, in their order, stacked where it is needed.
    const End into = end_of(options.into[i], false);
    const int stack = add({.name = cat(name, "-", nodes_[size_t(into.node)].name),
                           .open = joins("stack"),
                           .options = {.device = nodes_[size_t(into.node)].options.device,
                                       .inputs = numbered("x", count - 1),
                                       .outputs = {"y"}},
                           .what = "stack"});
    together_.push_back({stack, into.node});
    int port = 0;
    for (size_t j = 0; j < count; ++j) {
      if (j != i) connect(end_of(options.from[j], true), {stack, port++}, given);
    }
    connect({stack, 0}, into, {.gradients = false});
  }
}

void Graph::exchange(const Exchange& exchange, const std::vector<std::string>& nodes) {
  auto added = exchange;
  added.nodes = find_all(nodes);
  if (added.name.empty()) added.name = cat("exchange ", exchanges_.size());
  want(nodes.size() >= 2, exchange.name, "an exchange wants two nodes or more");
  want(exchange.every >= 1 && exchange.staleness >= 0, exchange.name,
       "every wants 1 or more, staleness 0 or more");
  for (const int node : added.nodes) {
    const auto& named = nodes_[size_t(node)];
    want(exchange.what == Exchange::What::Weights || named.options.role == Role::Train,
         exchange.name, "node '", named.name, "' is not trained, and has no gradients to trade");
  }
  exchanges_.push_back(std::move(added));
}

void Graph::broadcast_weights(const std::string& source, const std::vector<std::string>& nodes,
                              int64_t every) {
  std::vector<std::string> all{source};
  all.insert(all.end(), nodes.begin(), nodes.end());
  exchange({.name = cat("weights of ", source), .source = find(source), .every = every}, all);
}

// The nodes go into the region. Regions that they make up go in with them; the first that has
// others too is what the region itself is in. So it does not matter which of the two is told first.
void Graph::enclose(const std::vector<std::string>& names, int region, int arm) {
  const auto listed = find_all(names);
  const auto is_in = [&](const Node& node, int outer) {
    int at = node.region;
    while (at >= 0 && at != outer) at = regions_[size_t(at)].parent;
    return at == outer;
  };
  const auto goes_in = [&](int inner) {
    for (size_t i = 0; i < nodes_.size(); ++i)
      if (nodes_[i].what.empty() && is_in(nodes_[i], inner) &&
          std::ranges::count(listed, int(i)) == 0)
        return false;
    return true;
  };
  auto& own = regions_[size_t(region)];
  for (const int node : listed) {
    int* place = &nodes_[size_t(node)].region;
    int* place_arm = &nodes_[size_t(node)].arm;
    while (*place >= 0 && *place != region && goes_in(*place)) {
      place_arm = &regions_[size_t(*place)].parent_arm;
      place = &regions_[size_t(*place)].parent;
    }
    if (*place == region) continue;
    if (nodes_[size_t(node)].what.empty()) {  // else it is where the others are
      const std::pair outer(*place, *place_arm), known(own.parent, own.parent_arm);
      want(own.num_nodes++ == 0 || outer == known, own.name, "node '", nodes_[size_t(node)].name,
           "' is in another loop, branch or arm than the nodes before it in the list; one is ",
           "within the other or apart from it");
      std::tie(own.parent, own.parent_arm) = outer;
    }
    *place = region;
    *place_arm = arm;
  }
}

void Graph::loop(const std::string& given, const Loop& options) {
  const std::string name = given.empty() ? cat("loop ", regions_.size()) : given;
  want(!options.nodes.empty(), name, "a loop wants nodes");
  want(options.most >= 1, name, "most ", options.most, ", wanted at least one turn");
  Region region{.kind = Region::Kind::Loop, .name = name, .most = options.most};
  if (!options.until.empty()) {
    const End until = end_of(options.until, true);
    region.decides = {until.node, until.port};
    want(std::ranges::count(options.nodes, nodes_[size_t(until.node)].name) == 1, name,
         "until = ", options.until, " is an output of a node that is not in the loop");
  }
  regions_.push_back(region);
  enclose(options.nodes, int(regions_.size()) - 1, 0);
  for (const auto& [from, to] : options.carry) {
    const End a = end_of(from, true), b = end_of(to, false);
    edges_.push_back({.from = a.node,
                      .from_port = a.port,
                      .to = b.node,
                      .to_port = b.port,
                      .options = {.gradients = false},
                      .carried = true});
  }
}

void Graph::branch(const std::string& name, const Branch& options) {
  want(!options.then.empty() && !options.otherwise.empty(), name,
       "a branch wants nodes for both ways; a node `same` gives what it gets");
  want(!options.then_gives.empty() && !options.otherwise_gives.empty() && !options.when.empty(),
       name,
       "a branch wants `when`, and for both ways the output that leaves: then_gives, else_gives");
  const End when = end_of(options.when, true);
  regions_.push_back(
      {.kind = Region::Kind::Branch, .name = name, .decides = {when.node, when.port}});
  const int region = int(regions_.size()) - 1;
  // Each arm ends in a node of the same place, so that what follows has one giver.
  const End gives[2] = {end_of(options.then_gives, true), end_of(options.otherwise_gives, true)};
  int device = options.device;
  if (device < 0) device = nodes_[size_t(gives[0].node)].options.device;
  std::vector<std::string> arms[2] = {options.then, options.otherwise};
  std::vector<int> ends;
  for (int arm = 0; arm < 2; ++arm) {
    const std::string end = arm == 0 ? name : name + "-else";
    ends.push_back(add({.name = end,
                        .open = joins("concat"),
                        .options = {.device = device, .inputs = {"x"}, .outputs = {"y"}},
                        .what = "merge"}));
    connect(gives[arm], {ends.back(), 0}, {.gradients = false});
    arms[arm].push_back(end);
  }
  together_.push_back(ends);
  regions_[size_t(region)].ends = ends;
  for (int arm = 0; arm < 2; ++arm) enclose(arms[arm], region, arm);
}

void Graph::name_ports(const std::string& name, const std::string& first, const std::string& last) {
  also_[cat(">", name, ".x")] = first;
  also_[cat("<", name, ".y")] = last;
}

void Graph::subgraph(const std::string& name, const Graph& graph, const std::vector<int>& devices) {
  const int first = int(nodes_.size());
  const int regions = int(regions_.size());
  for (const int device : devices)
    want(device >= 0 && device < int(options_.devices.size()), name, "devices lists ", device,
         ", and the flow has ", options_.devices.size(), " (0 to ", options_.devices.size() - 1,
         "); see flow.devices");
  for (auto node : graph.nodes_) {
    const std::string inner = node.name;
    node.name = cat(name, "/", inner);
    for (auto* ports : {&node.inputs, &node.outputs})
      for (auto& port : *ports)
        for (auto& size : port.port.shape)
          if (!size.name.empty()) size.name = cat(name, "/", size.name);
    std::vector<int*> places{&node.options.device};
    for (int& replica : node.options.replicas) places.push_back(&replica);
    if (!devices.empty() && node.within.empty())
      node.within = devices;
    else
      for (int& device : node.within) places.push_back(&device);
    for (int* const place : places) {
      if (!devices.empty() && *place >= 0) {
        want(*place < int(devices.size()), name, "the graph within has a device ", *place,
             ", and devices lists ", devices.size());
        *place = devices[size_t(*place)];
      }
      want(*place < int(options_.devices.size()), name, "node '", node.name, "' wants device ",
           *place, ", and the flow has ", options_.devices.size());
    }
    if (!node.options.weights_of.empty())
      node.options.weights_of = cat(name, "/", node.options.weights_of);
    if (node.region >= 0) node.region += regions;
    if (node.copy_of >= 0) node.copy_of += first;
    // What came from outside and left now passes through.
    if (!node.feeds.empty() || !node.gives.empty()) {
      if (!node.feeds.empty()) {
        also_[cat(">", name, ".", inner)] = node.name;
        node.inputs = {{.port = {.name = "x"}}};
        node.options.inputs = {"x"};
      } else {
        also_[cat("<", name, ".", inner)] = node.name;
        node.outputs = {{.port = {.name = "y"}}};
        node.options.outputs = {"y"};
      }
      node.open = joins("concat");
      node.feeds = node.gives = {};
      node.what = "pass";
    }
    for (const auto& other : nodes_)
      want(other.name != node.name, name, "there are two nodes '", node.name, "'");
    nodes_.push_back(std::move(node));
  }
  const auto moved = [&](std::vector<int> list) {
    for (int& node : list) node += first;
    return list;
  };
  for (auto edge : graph.edges_) {
    edge.from += first, edge.to += first;
    edges_.push_back(edge);
  }
  for (auto exchange : graph.exchanges_) {
    exchange.nodes = moved(exchange.nodes);
    if (exchange.source >= 0) exchange.source += first;
    exchange.name = cat(name, "/", exchange.name);
    exchanges_.push_back(exchange);
  }
  for (auto region : graph.regions_) {
    if (region.parent >= 0) region.parent += regions;
    if (region.decides.first >= 0) region.decides.first += first;
    region.ends = moved(region.ends);
    region.name = cat(name, "/", region.name);
    regions_.push_back(region);
  }
  for (const auto& [key, value] : graph.also_)
    also_[cat(key[0], name, "/", key.substr(1))] = cat(name, "/", value);
  for (const auto& list : graph.together_) together_.push_back(moved(list));
  for (const auto& list : graph.apart_) apart_.push_back(moved(list));
}

}  // namespace yoke::flow
