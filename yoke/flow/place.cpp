// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/place.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/topo/host.h"

namespace yoke::flow {
namespace {

struct Sets {
  explicit Sets(size_t count) : parent(count) { std::iota(parent.begin(), parent.end(), 0); }
  int find(int item) {
    while (parent[size_t(item)] != item)
      item = parent[size_t(item)] = parent[size_t(parent[size_t(item)])];
    return item;
  }
  void join(int a, int b) { parent[size_t(find(a))] = find(b); }
  std::vector<int> parent;
};

std::map<topo::Device, uint64_t> by_device(const Graph& graph,
                                           const std::vector<uint64_t>& needed) {
  std::map<topo::Device, uint64_t> sums;
  for (size_t i = 0; i < needed.size(); ++i) sums[graph.options().devices[i]] += needed[i];
  return sums;
}

std::string numbers(const std::vector<int>& list) {
  std::vector<std::string> texts;
  for (const int number : list) texts.push_back(cat(number));
  return join(texts, ", ");
}

}  // namespace

std::string edge_name(const Graph& graph, const Edge& edge) {
  const auto& from = graph.nodes()[size_t(edge.from)];
  const auto& to = graph.nodes()[size_t(edge.to)];
  return cat(from.name, ".", from.outputs[size_t(edge.from_port)].port.name, " -> ", to.name, ".",
             to.inputs[size_t(edge.to_port)].port.name);
}

at::Device device_of(const topo::Device& device) {
  return device.kind == topo::DeviceKind::Cpu
             ? at::Device(at::kCPU)
             : at::Device(at::kCUDA, at::DeviceIndex(device.index));
}

Transport transport_of(const Graph& graph, const std::vector<int>& queue_of, const Edge& edge) {
  const int from = queue_of[size_t(edge.from)], to = queue_of[size_t(edge.to)];
  const auto &a = graph.options().devices[size_t(from)], &b = graph.options().devices[size_t(to)];
  auto asked = edge.options.transport;
  const auto &giver = graph.nodes()[size_t(edge.from)], &taker = graph.nodes()[size_t(edge.to)];
  if (asked == Transport::Send && (giver.region != taker.region || giver.arm != taker.arm))
    fail(Kind::Config, "edge '", edge_name(graph, edge),
         "': send goes from one operation to the next, and this edge into or out of a loop or ",
         "branch; use auto");
  if (asked == Transport::Send && from == to) asked = Transport::Auto;
  if (asked == Transport::Auto) return a == b ? Transport::Alias : Transport::Copy;
  if (asked == Transport::Alias && a != b)
    fail(Kind::Config, "edge '", edge_name(graph, edge),
         "': alias wants both ends on one device, got ", topo::to_text(a), " and ",
         topo::to_text(b), "; use auto");
  return asked;
}

std::vector<int> place(const Graph& graph, const std::vector<uint64_t>& needs,
                       const std::map<topo::Device, uint64_t>& free) {
  const auto& nodes = graph.nodes();
  const auto& devices = graph.options().devices;
  Sets sets(nodes.size());
  for (const auto& list : graph.together())
    for (const int node : list) sets.join(node, list[0]);
  for (size_t i = 0; i < nodes.size(); ++i)
    if (!nodes[i].options.weights_of.empty())
      sets.join(int(i), graph.find(nodes[i].options.weights_of));
  std::vector<int> of_set(nodes.size(), -1);
  std::vector<int> load(devices.size());
  std::vector<uint64_t> bytes(nodes.size());  // by set
  for (size_t i = 0; i < needs.size(); ++i) bytes[size_t(sets.find(int(i)))] += needs[i];
  // Who is pinned is where that says; the rest of a sub-graph is on its devices.
  std::vector<std::vector<bool>> open(nodes.size(), std::vector<bool>(devices.size(), true));
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto& within = nodes[i].within;
    if (nodes[i].options.device >= 0 || within.empty()) continue;
    auto& may = open[size_t(sets.find(int(i)))];
    for (int device = 0; device < int(devices.size()); ++device)
      if (std::ranges::count(within, device) == 0) may[size_t(device)] = false;
    if (std::ranges::count(may, true) == 0)
      fail(Kind::Config, "node '", nodes[i].name, "' is on the devices of its sub-graph (",
           numbers(within), "), and what it must be together with is on others; see colocate and ",
           "subgraph.devices");
  }
  const auto settle = [&](int node, int device) {
    const auto set = size_t(sets.find(node));
    if (!open[set][size_t(device)])
      fail(Kind::Config, "node '", nodes[size_t(node)].name, "' is pinned to device ", device,
           ", and what it must be together with is of a sub-graph on other devices; see colocate ",
           "and subgraph.devices");
    if (of_set[set] >= 0 && of_set[set] != device)
      fail(Kind::Config, "node '", nodes[size_t(node)].name, "' is pinned to device ", device,
           ", and what it must be together with (colocate, weights_of or a pattern) to device ",
           of_set[set]);
    of_set[set] = device;
  };
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i].options.device >= 0) {
      settle(int(i), nodes[i].options.device);
      ++load[size_t(nodes[i].options.device)];
    }
  std::map<topo::Device, uint64_t> used;
  for (size_t set = 0; set < nodes.size(); ++set)
    if (of_set[set] >= 0) used[devices[size_t(of_set[set])]] += bytes[set];
  const auto placed = [&](int node) { return of_set[size_t(sets.find(node))]; };
  const auto barred = [&](int node, int device) {
    const auto set = size_t(sets.find(node));
    if (!open[set][size_t(device)]) return true;
    const auto& on = devices[size_t(device)];
    const uint64_t has = bytes[set] > 0 ? free.at(on) : 0;
    if (has > 0 && used[on] + bytes[set] > has) return true;
    for (const auto& list : graph.apart()) {
      const bool mine =
          std::ranges::any_of(list, [&](int other) { return sets.find(other) == sets.find(node); });
      if (mine && std::ranges::any_of(list, [&](int other) {
            return sets.find(other) != sets.find(node) && placed(other) == device;
          }))
        return true;
    }
    return false;
  };
  // Where a node may go, the best first.
  const auto choices = [&](int node) {
    std::vector<int> may;
    for (int device = 0; device < int(devices.size()); ++device)
      if (!barred(node, device)) may.push_back(device);
    const bool weighs = bytes[size_t(sets.find(node))] > 0;
    std::ranges::stable_sort(may, {}, [&](int device) {
      return std::pair(weighs ? used[devices[size_t(device)]] : 0, load[size_t(device)]);
    });
    // What Yoke has put in itself stands beside what it cuts, or the last of what it joins: the
    // first is often beside the source, which has enough to do.
    int beside = -1;
    if (!nodes[size_t(node)].what.empty())
      for (const auto& edge : graph.edges()) {
        const bool joins = edge.to == node;
        const int other = edge.from == node ? edge.to : joins ? edge.from : node;
        if ((beside < 0 || joins) && placed(other) >= 0 && !barred(node, placed(other)))
          beside = placed(other);
      }
    if (beside >= 0) std::ranges::rotate(may, std::ranges::find(may, beside));
    return may;
  };
  // Each where it is best, and elsewhere where that leaves no place for a later one.
  constexpr int kMostTries = 100'000;
  int tries = 0, stuck = -1;
  const std::function<bool(size_t)> place_from = [&](size_t i) {
    while (i < nodes.size() && placed(int(i)) >= 0) ++i;
    if (i == nodes.size()) return true;
    const auto set = size_t(sets.find(int(i)));
    auto& place = of_set[set];
    for (const int device : choices(int(i))) {
      if (++tries > kMostTries) return false;
      place = device;
      ++load[size_t(device)];
      used[devices[size_t(device)]] += bytes[set];
      if (place_from(i + 1)) return true;
      place = -1;
      --load[size_t(device)];
      used[devices[size_t(device)]] -= bytes[set];
    }
    if (stuck < 0) stuck = int(i);
    return false;
  };
  if (!place_from(0)) {
    if (!needs.empty()) return flow::place(graph);  // check_memory() tells what is too much
    const auto& within = nodes[size_t(std::max(stuck, 0))].within;
    const bool of_part = !within.empty();
    fail(Kind::Config, "node '", nodes[size_t(std::max(stuck, 0))].name,
         "' must be separate from others, and there are only ", devices.size(), " devices",
         of_part ? cat(" (", numbers(within), " for its sub-graph)") : "",
         "; give more by flow.devices", of_part ? " and subgraph.devices" : "", ", or pin nodes");
  }
  std::vector<int> result;
  for (size_t i = 0; i < nodes.size(); ++i) result.push_back(placed(int(i)));
  for (const auto& list : graph.apart())
    for (size_t i = 0; i < list.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        if (result[size_t(list[i])] == result[size_t(list[j])])
          fail(Kind::Config, "nodes '", nodes[size_t(list[j])].name, "' and '",
               nodes[size_t(list[i])].name, "' must be separate, and both are on device ",
               result[size_t(list[i])]);
  return result;
}

uint64_t need_of(const NodeOptions& options, const Body& body) {
  if (!options.weights_of.empty()) return 0;
  uint64_t copies = 1;
  if (options.role == Role::Train)  // gradients, and what the optimizer keeps
    copies += 1 + (options.optimizer.kind == OptimizerOptions::Kind::AdamW ? 2
                   : options.optimizer.momentum > 0                        ? 1
                                                                           : 0);
  return copies * body.bytes;
}

std::vector<uint64_t> memory_of(const Graph& graph, const std::vector<int>& queue_of,
                                const std::vector<Body>& bodies) {
  std::vector<uint64_t> bytes(graph.options().devices.size());
  for (size_t i = 0; i < bodies.size(); ++i)
    bytes[size_t(queue_of[i])] += need_of(graph.nodes()[i].options, bodies[i]);
  return bytes;
}

std::map<topo::Device, uint64_t> free_memory(const Graph& graph) {
  const topo::Host host = graph.options().host ? *graph.options().host : topo::read_host();
  std::map<topo::Device, uint64_t> free;
  for (const auto& device : graph.options().devices) {
    const bool cpu = device.kind == topo::DeviceKind::Cpu;
    uint64_t has = cpu ? host.available_memory_bytes : 0;
    if (!cpu && size_t(device.index) < host.gpus.size())
      has = host.gpus[size_t(device.index)].free_bytes;
    if (graph.options().memory_gb > 0) has = uint64_t(graph.options().memory_gb * 1e9);
    free[device] = has;
  }
  return free;
}

bool fits(const Graph& graph, const std::map<topo::Device, uint64_t>& free,
          const std::vector<uint64_t>& needed) {
  return std::ranges::all_of(by_device(graph, needed), [&](const auto& sum) {
    const uint64_t has = free.at(sum.first);
    return has == 0 || sum.second <= has;
  });
}

void check_memory(const Graph& graph, const std::map<topo::Device, uint64_t>& free,
                  const std::vector<uint64_t>& needed) {
  for (const auto& [device, bytes] : by_device(graph, needed)) {
    const uint64_t has = free.at(device);
    if (has == 0 || bytes <= has) continue;
    fail(Kind::Config, "the nodes on ", topo::to_text(device), " need ", bytes_text(bytes),
         " for their weights, gradients and optimizers, and it has ", bytes_text(has),
         graph.options().memory_gb > 0 ? " (flow.memory_gb)" : "",
         "; put some on another device, or train fewer of them");
  }
}

std::vector<int64_t> firings_of(const Graph& graph) {
  const auto& nodes = graph.nodes();
  // By how much each fires more often than the first of its piece of the graph, as a fraction.
  std::vector<int64_t> up(nodes.size()), down(nodes.size(), 1);
  std::vector<std::vector<size_t>> edges_of(nodes.size());
  for (size_t i = 0; i < graph.edges().size(); ++i) {
    const auto& edge = graph.edges()[i];
    if (edge.options.policy != Policy::Block) continue;
    edges_of[size_t(edge.from)].push_back(i);
    edges_of[size_t(edge.to)].push_back(i);
  }
  std::vector<int64_t> result(nodes.size(), 1);
  for (size_t start = 0; start < nodes.size(); ++start) {
    if (up[start] != 0) continue;
    std::vector<size_t> piece{start};
    up[start] = 1;
    for (size_t at = 0; at < piece.size(); ++at)
      for (const size_t i : edges_of[piece[at]]) {
        const auto& edge = graph.edges()[i];
        const auto from = size_t(edge.from), to = size_t(edge.to);
        const int64_t gives = nodes[from].outputs[size_t(edge.from_port)].tokens;
        const int64_t takes = nodes[to].inputs[size_t(edge.to_port)].tokens;
        const bool forward = piece[at] == from;
        const size_t next = forward ? to : from;
        const int64_t more = forward ? gives : takes, less = forward ? takes : gives;
        int64_t a = up[piece[at]] * more, b = down[piece[at]] * less;
        const int64_t divisor = std::gcd(a, b);
        a /= divisor, b /= divisor;
        if (up[next] == 0) {
          up[next] = a, down[next] = b;
          piece.push_back(next);
          if (a > 1'000'000 || b > 1'000'000)
            fail(Kind::Config, "the rates of ports make node '", nodes[next].name,
                 "' fire more than a million times a round; see edge '", edge_name(graph, edge),
                 "'");
        } else if (up[next] * b != a * down[next]) {
          fail(Kind::Config, "edge '", edge_name(graph, edge), "': ", nodes[from].name, " gives ",
               gives, " a firing and ", nodes[to].name, " takes ", takes,
               ", which does not go with the other edges between them: no numbers of firings ",
               "balance; the other edges want ", nodes[next].name, " to fire ", up[next], "/",
               down[next], " times and this one ", a, "/", b);
        }
      }
    int64_t common = 1;
    for (const size_t node : piece) {
      common = std::lcm(common, down[node]);
      if (common > 1'000'000)
        fail(Kind::Config, "the rates of ports make node '", nodes[node].name,
             "' and those before it fire more than a million times a round");
    }
    int64_t divisor = 0;
    for (const size_t node : piece) {
      result[node] = up[node] * (common / down[node]);
      divisor = std::gcd(divisor, result[node]);
    }
    for (const size_t node : piece) result[node] /= divisor;
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (result[i] > 4096)
      fail(Kind::Config, "node '", nodes[i].name, "' would fire ", result[i], " times a round");
    const bool outward = !nodes[i].feeds.empty() || !nodes[i].gives.empty();
    if (outward && (result[i] != 1 || nodes[i].region >= 0))
      fail(Kind::Config, "'", nodes[i].name, "' is ",
           nodes[i].feeds.empty() ? "an output" : "an input",
           " of the flow, one value a round: it cannot be in a loop or branch, nor at a port of ",
           "another rate; got ", result[i], " firings of it in a round");
    if (nodes[i].region < 0) continue;
    const auto single = [](const Port& port) { return port.tokens == 1; };
    if (result[i] != 1 || !std::ranges::all_of(nodes[i].inputs, single) ||
        !std::ranges::all_of(nodes[i].outputs, single))
      fail(Kind::Config, "node '", nodes[i].name, "' is in a loop or branch, where every port ",
           "takes and gives one value; got ", result[i], " firings of it in a round");
  }
  return result;
}

}  // namespace yoke::flow
