// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/lower.h"

#include <algorithm>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/firing_order.h"
#include "yoke/flow/gradients.h"
#include "yoke/flow/place.h"

namespace yoke::flow {
namespace {

using Kind = Task::Kind;
using plan::Operation;

// The top of the graph, the body of a loop or an arm of a branch.
struct Level {
  int region = -1, arm = 0;
  bool operator==(const Level&) const = default;
};

struct Item {
  bool is_region = false;
  int id = 0;
  auto operator<=>(const Item&) const = default;
};

class Lowering {
 public:
  explicit Lowering(Compiled& out)
      : out_(out),
        graph_(out.graph),
        nodes_(out.graph.nodes()),
        into_(nodes_.size()),
        from_(nodes_.size()) {
    for (size_t i = 0; i < graph_.edges().size(); ++i) {
      into_[size_t(graph_.edges()[i].to)].push_back(int(i));
      from_[size_t(graph_.edges()[i].from)].push_back(int(i));
    }
  }

  void run() {
    for (const auto& device : graph_.options().devices) devices_.push_back(topo::to_text(device));
    // Several places on one device are told apart by their numbers.
    for (size_t i = 0; i < devices_.size(); ++i)
      queues_.push_back(std::ranges::count(devices_, devices_[i]) > 1 ? cat(devices_[i], "#", i)
                                                                      : devices_[i]);
    check_inputs();
    check_arms();
    check_rounds();
    gradients_ = find_gradients(graph_, out_.bodies);
    out_.carries.resize(nodes_.size());
    out_.trains = gradients_.trains;
    for (size_t i = 0; i < graph_.edges().size(); ++i)
      if (gradients_.carried[i]) {
        const auto& edge = graph_.edges()[i];
        out_.carries[size_t(edge.to)].push_back(edge.to_port);
      }
    emit(Level{}, out_.program, out_.tasks);
  }

 private:
  struct Frame {  // of a level while it is emitted
    Level level;
    plan::Program& program;
    Tasks& tasks;
    std::map<int, std::pair<int, int>> channels = {};            // by edge: given, taken
    std::map<std::pair<int, int>, std::vector<int>> extra = {};  // by node and output port
    std::map<int, int> when = {};                                // by branch: its channel
    std::map<std::pair<std::string, int>, int> groups = {};      // by name and region
    std::map<int, int> weights = {}, values = {};  // buffers: by owner; by node and port
  };

  Level level_of(int node) const { return {nodes_[size_t(node)].region, nodes_[size_t(node)].arm}; }
  Level above(const Level& level) const {
    const auto& region = graph_.regions()[size_t(level.region)];
    return {region.parent, region.parent_arm};
  }
  bool within(int node, const Level& level) const {
    Level at = level_of(node);
    while (at.region >= 0 && !(at == level)) at = above(at);
    return level.region < 0 || at == level;
  }
  Item item_at(int node, const Level& level) const {
    Level at = level_of(node);
    if (at == level || (at.region < 0 && level.region < 0)) return {false, node};
    while (!(above(at) == level) && above(at).region >= 0) at = above(at);
    return {true, at.region};
  }
  int queue(int node) const { return out_.queue_of[size_t(node)]; }

  void check_inputs() const {
    for (size_t i = 0; i < nodes_.size(); ++i)
      for (size_t port = 0; port < nodes_[i].inputs.size(); ++port)
        if (std::ranges::none_of(into_[i], [&](int edge) {
              return graph_.edges()[size_t(edge)].to_port == int(port);
            }))
          fail(yoke::Kind::Config, "input '", nodes_[i].name, ".", nodes_[i].inputs[port].port.name,
               "' has no edge; give it one, or make it an input of the flow");
  }

  void check_arms() const {
    for (const auto& edge : graph_.edges()) {
      std::vector<Level> levels;
      for (Level at = level_of(edge.from); at.region >= 0; at = above(at)) levels.push_back(at);
      for (Level at = level_of(edge.to); at.region >= 0; at = above(at))
        for (const auto& other : levels)
          if (other.region == at.region && other.arm != at.arm)
            fail(yoke::Kind::Config, "edge '", edge_name(graph_, edge),
                 "' goes from one arm of branch '", graph_.regions()[size_t(at.region)].name,
                 "' to the other; only one of them runs");
      for (const auto& level : levels) {
        const auto& region = graph_.regions()[size_t(level.region)];
        if (region.kind == Region::Kind::Branch && !within(edge.to, level) &&
            edge.from != region.ends[0])
          fail(yoke::Kind::Config, "edge '", edge_name(graph_, edge), "' leaves an arm of branch '",
               region.name, "', which may not run; take '", region.name, ".y'");
      }
    }
  }

  // `every` and `staleness` count rounds; a loop has turns, and an arm does not run in all of them.
  void check_rounds() const {
    for (const auto& edge : graph_.edges()) {
      const Level from = level_of(edge.from), to = level_of(edge.to);
      const Level inner = to.region >= 0 ? to : from;
      if (inner.region < 0) continue;
      Level both = from;
      while (!within(edge.to, both)) both = above(both);
      const auto& region = graph_.regions()[size_t(inner.region)];
      const bool loop = region.kind == Region::Kind::Loop;
      const bool enters_arm = from.region < 0 && !loop && region.parent < 0;
      const char* key = edge.options.staleness > 0 && both.region >= 0 ? "staleness"
                        : edge.options.every > 1 && !enters_arm        ? "every"
                                                                       : nullptr;
      if (key != nullptr)
        fail(yoke::Kind::Config, "edge '", edge_name(graph_, edge), "': ", key,
             " counts rounds, and ", loop ? "loop '" : "branch '", region.name,
             "' does not run the edge's end once in each; give it to an edge outside, between two ",
             "nodes (`same` does nothing) before or after the ", loop ? "loop" : "branch");
    }
  }

  // Who takes part in a region: the queues of its nodes, and that of who decides.
  std::vector<int> queues_of(int region) const {
    std::set<int> queues;
    for (size_t i = 0; i < nodes_.size(); ++i)
      for (Level at = level_of(int(i)); at.region >= 0; at = above(at))
        if (at.region == region) queues.insert(queue(int(i)));
    if (const int decider = graph_.regions()[size_t(region)].decides.first; decider >= 0)
      queues.insert(queue(decider));
    return {queues.begin(), queues.end()};
  }

  Transport transport(const Edge& edge) const { return transport_of(graph_, out_.queue_of, edge); }

  int add_channel(Frame& frame, plan::Channel channel) {
    frame.program.channels.push_back(std::move(channel));
    return int(frame.program.channels.size()) - 1;
  }

  plan::Channel channel_of(const Edge& edge, int64_t initial) const {
    const auto& from = nodes_[size_t(edge.from)];
    const auto& to = nodes_[size_t(edge.to)];
    const auto& given = from.outputs[size_t(edge.from_port)];
    const auto& taken = to.inputs[size_t(edge.to_port)];
    const int64_t a_round = out_.firings[size_t(edge.from)] * given.tokens;
    plan::Channel channel{.name = edge_name(graph_, edge),
                          .initial = initial,
                          .waits = edge.options.policy == Policy::Block};
    const auto how = transport(edge);
    channel.moves = how == Transport::Copy || how == Transport::Host;
    channel.capacity = edge.options.capacity > 0 ? edge.options.capacity : initial + 2 * a_round;
    if (given.declared) channel.given = given.port;
    if (taken.declared) channel.taken = taken.port;
    for (const auto* port : {&taken, &given}) {
      if (!port->declared) continue;
      double bytes = double(plan::size_of(port->port.type));
      for (const auto& size : port->port.shape) bytes *= size.fixed() ? double(size.least) : 1;
      channel.bytes = std::max(channel.bytes, bytes);
    }
    return channel;
  }

  void make_channels(Frame& frame) {
    const auto& edges = graph_.edges();
    std::map<std::pair<int, int>, int> carried;  // by node and input port
    for (size_t i = 0; i < edges.size(); ++i) {
      const auto& edge = edges[i];
      const bool from = within(edge.from, frame.level), to = within(edge.to, frame.level);
      if (!from || !to) continue;
      const Item a = item_at(edge.from, frame.level), b = item_at(edge.to, frame.level);
      if (a == b && a.is_region) continue;
      if (edge.carried) {
        auto channel = channel_of(edge, 1);
        channel.capacity = 1;
        const int made = add_channel(frame, std::move(channel));
        frame.channels[int(i)] = {made, made};
        carried[{edge.to, edge.to_port}] = made;
        continue;
      }
      const int64_t initial = edge.options.staleness * out_.firings[size_t(edge.from)] *
                              nodes_[size_t(edge.from)].outputs[size_t(edge.from_port)].tokens;
      if (edge.options.policy != Policy::Block) {
        auto channel = channel_of(edge, 1);
        channel.capacity = std::max<int64_t>(channel.capacity, 1);
        const int made = add_channel(frame, std::move(channel));
        frame.channels[int(i)] = {made, made};
      } else if (transport(edge) == Transport::Send) {
        auto out = channel_of(edge, 0);
        out.name += " (to send)";
        out.taken = {};
        const int given = add_channel(frame, std::move(out));
        frame.channels[int(i)] = {given, add_channel(frame, channel_of(edge, initial))};
      } else {
        const int made = add_channel(frame, channel_of(edge, initial));
        frame.channels[int(i)] = {made, made};
      }
    }
    for (size_t i = 0; i < edges.size(); ++i) {
      const auto& edge = edges[i];
      const bool from = within(edge.from, frame.level), to = within(edge.to, frame.level);
      if (from == to) continue;
      const auto first = carried.find({edge.to, edge.to_port});
      if (to && first != carried.end()) {
        frame.channels[int(i)] = {first->second, first->second};
        entry_of_carried_.insert({frame.level.region, int(i)});
        continue;
      }
      auto channel = channel_of(edge, 0);
      channel.waits = false;
      channel.capacity = 1;
      channel.name += to ? " (held)" : " (last)";
      const int made = add_channel(frame, std::move(channel));
      frame.channels[int(i)] = {made, made};
    }
    for (const auto& [end, channel] : carried) {
      const bool has_first = std::ranges::any_of(edges, [&](const Edge& edge) {
        return !edge.carried && edge.to == end.first && edge.to_port == end.second &&
               !within(edge.from, frame.level);
      });
      if (!has_first)
        fail(yoke::Kind::Config, "'", frame.program.channels[size_t(channel)].name,
             "' is carried from turn to turn and has no first value; give the input an edge from ",
             "outside of the loop");
    }
    // What decides: of a branch beside it, of this loop within.
    for (size_t i = 0; i < graph_.regions().size(); ++i) {
      const auto& region = graph_.regions()[i];
      const auto [node, port] = region.decides;
      if (node < 0) continue;
      if (region.kind == Region::Kind::Branch &&
          Level{region.parent, region.parent_arm} == frame.level) {
        if (!(level_of(node) == frame.level))
          fail(yoke::Kind::Config, "branch '", region.name, "': when is decided by node '",
               nodes_[size_t(node)].name, "', which must stand beside the branch");
        const int made = add_channel(
            frame,
            {.name = cat(nodes_[size_t(node)].name, " -> branch ", region.name), .capacity = 2});
        frame.extra[{node, port}].push_back(made);
        frame.when[int(i)] = made;
      } else if (region.kind == Region::Kind::Loop && int(i) == frame.level.region) {
        if (!(level_of(node) == frame.level))
          fail(yoke::Kind::Config, "loop '", region.name, "': until is decided by node '",
               nodes_[size_t(node)].name, "', which must not be in a loop or branch within");
        const int made = add_channel(
            frame, {.name = cat(nodes_[size_t(node)].name, " -> until"), .waits = false});
        frame.extra[{node, port}].push_back(made);
        frame.when[int(i)] = made;
      }
    }
  }

  void append(Frame& frame, int queue, Operation operation, Task task) {
    frame.program.rows[size_t(queue)].push_back(std::move(operation));
    frame.tasks.rows[size_t(queue)].push_back(std::move(task));
  }

  // `region`: loops of one name meet each for itself.
  int group(Frame& frame, const std::string& name, const std::vector<int>& queues,
            int region = -1) {
    const auto [found, fresh] =
        frame.groups.try_emplace({name, region}, int(frame.program.groups.size()));
    if (fresh) frame.program.groups.push_back({name, queues});
    return found->second;
  }

  int owner(int node) const {
    const auto& shared = nodes_[size_t(node)].options.weights_of;
    return shared.empty() ? node : owner(graph_.find(shared));
  }

  void use_weights(Frame& frame, Operation& operation, int node, bool writes) {
    const int whose = owner(node);
    if (out_.bodies[size_t(whose)].weights.empty()) return;
    const auto [found, fresh] = frame.weights.try_emplace(whose, int(frame.program.buffers.size()));
    if (fresh) frame.program.buffers.push_back(cat("weights of ", nodes_[size_t(whose)].name));
    for (auto& use : operation.uses)
      if (use.buffer == found->second) {
        use.writes = use.writes || writes;
        return;
      }
    operation.uses.push_back({found->second, writes});
  }

  // One value in the hands of several, one of which writes into it.
  void use_value(Frame& frame, Operation& operation, const Edge& edge, bool writes) {
    const auto shares = [&](int i) {
      const auto& other = graph_.edges()[size_t(i)];
      return other.from_port == edge.from_port && transport(other) == Transport::Alias;
    };
    const auto writer = [&](int i) {
      const auto& other = graph_.edges()[size_t(i)];
      return shares(i) && other.to_port == 0 && nodes_[size_t(other.to)].options.in_place;
    };
    const auto& all = from_[size_t(edge.from)];
    if (std::ranges::count_if(all, shares) < 2 || std::ranges::none_of(all, writer)) return;
    const int key = edge.from * 4096 + edge.from_port;
    const auto [found, fresh] = frame.values.try_emplace(key, int(frame.program.buffers.size()));
    if (fresh)
      frame.program.buffers.push_back(cat("the value of ", nodes_[size_t(edge.from)].name));
    operation.uses.push_back({found->second, writes});
  }

  void fire_node(Frame& frame, int id, int64_t firing) {
    const auto& node = nodes_[size_t(id)];
    const auto& edges = graph_.edges();
    Operation operation{
        .name = out_.firings[size_t(id)] > 1 ? cat(node.name, ".", firing) : node.name,
        .cost = node.options.ms / 1000};
    Task task{.kind = Kind::Forward, .node = id};
    for (size_t port = 0; port < node.inputs.size(); ++port) {
      int edge_in = -1;
      for (const int i : into_[size_t(id)]) {
        const auto& edge = edges[size_t(i)];
        if (edge.to_port == int(port) && !edge.carried && frame.channels.contains(i)) edge_in = i;
      }
      YOKE_CHECK(edge_in >= 0, "'", node.name, ".", node.inputs[port].port.name,
                 "' has no channel");
      const auto& edge = edges[size_t(edge_in)];
      operation.takes.push_back({frame.channels.at(edge_in).second, node.inputs[port].tokens});
      task.take_ports.push_back(int(port));
      task.take_edges.push_back(edge_in);
      use_value(frame, operation, edge, port == 0 && node.options.in_place);
    }
    std::vector<int> sent;
    for (size_t port = 0; port < node.outputs.size(); ++port) {
      const auto give = [&](int channel, int edge) {
        operation.gives.push_back({channel, node.outputs[port].tokens});
        task.give_ports.push_back(int(port));
        task.give_edges.push_back(edge);
      };
      for (const int i : from_[size_t(id)]) {
        const auto found = frame.channels.find(i);
        if (found == frame.channels.end() || edges[size_t(i)].from_port != int(port)) continue;
        const auto [given, taken] = found->second;
        give(given, i);
        if (given != taken) sent.push_back(i);
      }
      if (const auto extra = frame.extra.find({id, int(port)}); extra != frame.extra.end())
        for (const int channel : extra->second) give(channel, -1);
    }
    use_weights(frame, operation, id, false);
    append(frame, queue(id), std::move(operation), std::move(task));
    for (const int i : sent)
      send(frame, i, false, queue(id), queue(edges[size_t(i)].to), frame.channels.at(i),
           node.outputs[size_t(edges[size_t(i)].from_port)].tokens);
  }

  void send(Frame& frame, int edge, bool gradient, int from, int to, std::pair<int, int> channels,
            int64_t count) {
    const std::string what = frame.program.channels[size_t(channels.second)].name;
    append(frame, from,
           {.name = cat("send ", what),
            .kind = Operation::Kind::Send,
            .takes = {{channels.first, count}},
            .peer = to,
            .what = what},
           {.kind = Kind::Send, .edge = edge, .gradient = gradient});
    append(frame, to,
           {.name = cat("receive ", what),
            .kind = Operation::Kind::Recv,
            .gives = {{channels.second, count}},
            .peer = from,
            .what = what},
           {.kind = Kind::Recv, .edge = edge, .gradient = gradient});
  }

  void fire_region(Frame& frame, int id) {
    const auto& region = graph_.regions()[size_t(id)];
    const auto& edges = graph_.edges();
    const bool loop = region.kind == Region::Kind::Loop;
    const auto queues = queues_of(id);
    const int arms = loop ? 1 : 2;
    std::vector<int> parts;
    std::vector<std::map<int, std::pair<int, int>>> inner;
    std::vector<int> until;
    for (int arm = 0; arm < arms; ++arm) {
      parts.push_back(int(frame.program.parts.size()));
      // Not into the vectors before it is whole: emit() adds parts of its own to its own.
      plan::Program program;
      Tasks tasks;
      auto made = emit({id, arm}, program, tasks);
      frame.program.parts.push_back(std::move(program));
      frame.tasks.parts.push_back(std::move(tasks));
      inner.push_back(std::move(made.channels));
      until.push_back(made.when.contains(id) ? made.when.at(id) : -1);
    }
    const int members = group(frame, cat(loop ? "loop " : "branch ", region.name), queues, id);
    for (const int at : queues) {
      Operation operation{.name = region.name,
                          .kind = loop ? Operation::Kind::Loop : Operation::Kind::Branch,
                          .group = members,
                          .what = region.name,
                          .parts = parts,
                          .turns = region.decides.first < 0 ? region.most : 0};
      Task task{.kind = loop ? Kind::Loop : Kind::Branch, .region = id};
      const auto inside = [&](int node) {
        for (Level level = level_of(node); level.region >= 0; level = above(level))
          if (level.region == id) return level.arm;
        return -1;
      };
      for (const auto& [i, channel] : frame.channels) {
        const auto& edge = edges[size_t(i)];
        const int from = inside(edge.from), to = inside(edge.to);
        if (from < 0 && to >= 0 && queue(edge.to) == at) {
          operation.takes.push_back({channel.second, 1});
          task.take_edges.push_back(i);
          task.enters.push_back(
              {to, inner[size_t(to)].at(i).second, entry_of_carried_.contains({id, i})});
        } else if (from >= 0 && to < 0 && queue(edge.from) == at) {
          operation.gives.push_back({channel.first, 1});
          task.give_edges.push_back(i);
          std::vector<Task::Inner> sources{{from, inner[size_t(from)].at(i).first}};
          if (!loop) sources = leaving(id, i, inner);
          task.leaves.push_back(std::move(sources));
        }
      }
      const int decider = region.decides.first;
      task.decides = decider >= 0 && queue(decider) == at;
      if (task.decides && loop) task.decider_channel = until[0];
      if (task.decides && !loop) {
        task.decider_channel = int(operation.takes.size());
        operation.takes.push_back({frame.when.at(id), 1});
        task.take_edges.push_back(-1);
        task.enters.push_back({-1, -1});
      }
      append(frame, at, std::move(operation), std::move(task));
    }
  }

  // An edge that leaves a branch begins at the end of its first arm; that of the other arm gives
  // through a channel of its own.
  std::vector<Task::Inner> leaving(int region, int edge,
                                   const std::vector<std::map<int, std::pair<int, int>>>& inner) {
    std::vector<Task::Inner> sources;
    for (int arm = 0; arm < 2; ++arm) {
      const auto found = inner[size_t(arm)].find(edge);
      if (found != inner[size_t(arm)].end()) {
        sources.push_back({arm, found->second.first});
      } else {
        sources.push_back({arm, other_end_.at({region, edge})});
      }
    }
    return sources;
  }

  Frame emit(const Level& level, plan::Program& program, Tasks& tasks) {
    const size_t queues = graph_.options().devices.size();
    program.name =
        level.region < 0 ? graph_.options().name : graph_.regions()[size_t(level.region)].name;
    program.queues = queues_;
    program.rows.resize(queues);
    tasks.rows.resize(queues);
    Frame frame{.level = level, .program = program, .tasks = tasks};
    make_channels(frame);
    if (level.region >= 0 && level.arm == 1) mirror_end(frame);
    std::set<int> phases;
    for (const auto& node : nodes_) phases.insert(node.options.phase);
    if (level.region >= 0) phases = {0};
    for (const int phase : phases) {
      if (phase != *phases.begin()) barrier(frame, phase);
      fire_all(frame, phase);
      if (level.region < 0) train(frame, phase);
    }
    return frame;
  }

  // The edges that leave by the end of the first arm leave the second by its own.
  void mirror_end(Frame& frame) {
    const auto& region = graph_.regions()[size_t(frame.level.region)];
    for (size_t i = 0; i < graph_.edges().size(); ++i) {
      const auto& edge = graph_.edges()[i];
      if (edge.from != region.ends[0]) continue;
      auto channel = channel_of(edge, 0);
      channel.waits = false, channel.capacity = 1;
      channel.name += " (last)";
      const int made = add_channel(frame, std::move(channel));
      frame.extra[{region.ends[1], 0}].push_back(made);
      other_end_[{frame.level.region, int(i)}] = made;
    }
  }

  void barrier(Frame& frame, int phase) {
    if (queues_.size() < 2) return;
    std::vector<int> all;
    for (size_t i = 0; i < queues_.size(); ++i) all.push_back(int(i));
    const std::string name = cat("phase ", phase);
    const int members = group(frame, "phases", all);
    for (const int at : all)
      append(frame, at,
             {.name = name, .kind = Operation::Kind::Collective, .group = members, .what = name},
             {.kind = Kind::Barrier});
  }

  // Fires what can be fired until nothing is left; what cannot is put at the end as it was
  // declared, for the proof to tell why.
  void fire_all(Frame& frame, int phase) {
    std::vector<Item> items;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (!within(int(i), frame.level)) continue;
      const Item item = item_at(int(i), frame.level);
      if (frame.level.region < 0 && nodes_[i].options.phase != phase) continue;
      if (!item.is_region || std::ranges::count(items, item) == 0) items.push_back(item);
    }
    std::map<Item, int> place;
    std::vector<int64_t> firings;
    for (const auto& item : items) {
      place[item] = int(firings.size());
      firings.push_back(item.is_region ? 1 : out_.firings[size_t(item.id)]);
    }
    const auto place_of = [&](int node) {
      if (!within(node, frame.level)) return -1;
      const auto found = place.find(item_at(node, frame.level));
      return found == place.end() ? -1 : found->second;
    };
    std::vector<FiringLink> links;
    for (const auto& [i, channel] : frame.channels) {
      const auto& edge = graph_.edges()[size_t(i)];
      const int from = place_of(edge.from), to = place_of(edge.to);
      if (from >= 0 && from == to && items[size_t(from)].is_region) continue;
      const auto rate = [&](int at, const Port& port) {
        return at >= 0 && items[size_t(at)].is_region ? 1 : port.tokens;
      };
      const bool outside = !within(edge.from, frame.level);
      const bool earlier =
          frame.level.region < 0 && nodes_[size_t(edge.from)].options.phase < phase;
      const bool there = outside || edge.carried || earlier || edge.options.policy != Policy::Block;
      links.push_back(
          {.from = from,
           .to = to,
           .gives = rate(from, nodes_[size_t(edge.from)].outputs[size_t(edge.from_port)]),
           .takes = rate(to, nodes_[size_t(edge.to)].inputs[size_t(edge.to_port)]),
           .held = there ? INT32_MAX : frame.program.channels[size_t(channel.second)].initial});
    }
    std::vector<int> after;  // a branch: who decides has been
    for (const auto& item : items) {
      const auto* region = item.is_region ? &graph_.regions()[size_t(item.id)] : nullptr;
      const bool waits = region && region->kind == Region::Kind::Branch;
      const auto found = waits ? place.find(Item{false, region->decides.first}) : place.end();
      after.push_back(found == place.end() ? -1 : found->second);
    }
    std::vector<int64_t> fired(items.size());
    for (const size_t k : firing_order(firings, links, after)) {
      if (items[k].is_region)
        fire_region(frame, items[k].id);
      else
        fire_node(frame, items[k].id, fired[k]++);
    }
  }

  void train(Frame& frame, int phase) {
    const auto& edges = graph_.edges();
    // Gradients go the way back.
    for (const int id : gradients_.order) {
      if (gradients_.phase[size_t(id)] != phase) continue;
      const auto& node = nodes_[size_t(id)];
      std::vector<std::pair<int, int>> sent;  // gradient channels, edges
      for (int64_t firing = 0; firing < out_.firings[size_t(id)]; ++firing) {
        Operation operation{
            .name = cat(node.name, " back", out_.firings[size_t(id)] > 1 ? cat(".", firing) : ""),
            .cost = 2 * node.options.ms / 1000};
        Task task{.kind = Kind::Backward, .node = id};
        for (size_t i = 0; i < edges.size(); ++i) {
          const auto& edge = edges[i];
          if (!gradients_.carried[i]) continue;
          const bool crosses = transport(edge) == Transport::Send;
          if (edge.from == id) {
            operation.takes.push_back({gradient_channels(frame, int(i)).second,
                                       node.outputs[size_t(edge.from_port)].tokens});
            task.take_ports.push_back(edge.from_port);
            task.take_edges.push_back(int(i));
          }
          if (edge.to == id) {
            operation.gives.push_back(
                {gradient_channels(frame, int(i)).first, node.inputs[size_t(edge.to_port)].tokens});
            task.give_ports.push_back(edge.to_port);
            task.give_edges.push_back(int(i));
            if (crosses) sent.emplace_back(int(i), firing);
          }
        }
        use_weights(frame, operation, id, false);
        append(frame, queue(id), std::move(operation), std::move(task));
        for (const auto& [i, at] : sent) {
          const auto channels = gradient_channels(frame, i);
          send(frame, i, true, queue(id), queue(edges[size_t(i)].from), channels,
               node.inputs[size_t(edges[size_t(i)].to_port)].tokens);
        }
        sent.clear();
      }
    }
    trade(frame, phase, Exchange::What::Gradients);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].options.role != Role::Train || !nodes_[i].options.weights_of.empty()) continue;
      if (gradients_.phase[i] != phase) continue;
      Operation operation{.name = cat(nodes_[i].name, " step")};
      use_weights(frame, operation, int(i), true);
      append(frame, queue(int(i)), std::move(operation), {.kind = Kind::Step, .node = int(i)});
    }
    trade(frame, phase, Exchange::What::Weights);
  }

  std::pair<int, int> gradient_channels(Frame& frame, int edge) {
    const auto found = gradient_channels_.find(edge);
    if (found != gradient_channels_.end()) return found->second;
    const auto& e = graph_.edges()[size_t(edge)];
    const int64_t a_round =
        out_.firings[size_t(e.from)] * nodes_[size_t(e.from)].outputs[size_t(e.from_port)].tokens;
    plan::Channel channel{.name = cat("gradient of ", edge_name(graph_, e)),
                          .capacity = 2 * a_round};
    const auto& forth = frame.program.channels[size_t(frame.channels.at(edge).second)];
    channel.bytes = forth.bytes;
    channel.moves = forth.moves;
    std::pair<int, int> made;
    if (transport(e) == Transport::Send) {
      auto out = channel;
      out.name += " (to send)";
      made.first = add_channel(frame, std::move(out));
      made.second = add_channel(frame, std::move(channel));
    } else {
      made.first = made.second = add_channel(frame, std::move(channel));
    }
    return gradient_channels_[edge] = made;
  }

  void trade(Frame& frame, int phase, Exchange::What what) {
    for (size_t i = 0; i < graph_.exchanges().size(); ++i) {
      const auto& exchange = graph_.exchanges()[i];
      if (exchange.what != what) continue;
      int when = 0;
      std::map<int, std::vector<int>> by_queue;
      for (const int node : exchange.nodes) {
        when = std::max(when, gradients_.phase[size_t(node)]);
        by_queue[queue(node)].push_back(node);
        if (what == Exchange::What::Gradients &&
            gradients_.phase[size_t(node)] != gradients_.phase[size_t(exchange.nodes[0])])
          fail(yoke::Kind::Config, "exchange '", exchange.name, "': nodes '",
               nodes_[size_t(exchange.nodes[0])].name, "' and '", nodes_[size_t(node)].name,
               "' take their steps in different phases; gradients are traded in one");
        const auto is_copy = [&](const Node& other) { return other.copy_of == node; };
        if (!exchange.copies && !exchange.in_copies && node != exchange.source &&
            (nodes_[size_t(node)].copy_of >= 0 || std::ranges::any_of(nodes_, is_copy)))
          fail(yoke::Kind::Config, "exchange '", exchange.name, "': node '",
               nodes_[size_t(node)].name,
               "' is one of several copies (replicas, data_parallel), which trade by themselves; ",
               "name all nodes of the exchange in one data_parallel, or none of them");
        if (nodes_[size_t(node)].region >= 0)
          fail(yoke::Kind::Config, "exchange '", exchange.name, "': node '",
               nodes_[size_t(node)].name,
               "' is in a loop or branch; models trade weights and gradients outside of them");
      }
      if (when != phase) continue;
      std::vector<int> queues;
      for (const auto& [at, nodes] : by_queue) queues.push_back(at);
      const int members =
          queues.size() > 1 ? group(frame, cat(exchange.name, " (exchange ", i, ")"), queues) : -1;
      for (const auto& [at, nodes] : by_queue) {
        Operation operation{
            .name = exchange.name,
            .kind = members < 0 ? Operation::Kind::Compute : Operation::Kind::Collective,
            .group = members,
            .what = members < 0 ? "" : exchange.name};
        for (const int node : nodes)
          use_weights(frame, operation, node,
                      what == Exchange::What::Weights && node != exchange.source);
        append(frame, at, std::move(operation),
               {.kind = Kind::Trade, .nodes = nodes, .exchange = int(i)});
      }
    }
  }

  Compiled& out_;
  const Graph& graph_;
  const std::vector<Node>& nodes_;
  std::vector<std::vector<int>> into_, from_;  // edges, by node
  std::vector<std::string> devices_, queues_;
  Gradients gradients_;
  std::set<std::pair<int, int>> entry_of_carried_;        // region and edge
  std::map<std::pair<int, int>, int> other_end_;          // by branch and edge
  std::map<int, std::pair<int, int>> gradient_channels_;  // by edge
};

}  // namespace

void lower(Compiled& compiled) { Lowering(compiled).run(); }

}  // namespace yoke::flow
