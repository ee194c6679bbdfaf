// SPDX-License-Identifier: Apache-2.0
// Data parallelism: copies of nodes and of all that they make up, each for a part of the rows.
#include <algorithm>
#include <tuple>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/graph.h"
#include "yoke/flow/words.h"

namespace yoke::flow {

// One call of data_parallel. The nodes of the graph become copy 0, nodes NAME@1 … the others.
class Graph::Copies {
 public:
  Copies(Graph& graph, const std::string& name, const Split& options)
      : graph_(graph),
        name_(name),
        devices_(options.devices),
        count_(int(options.devices.size())),
        listed_(graph.find_all(options.nodes)) {
    check_devices();
    check_nodes();
    connect_chain();
    close();
    find_level();
  }

  void make() {
    copy_nodes();
    copy_edges();
    name_ports();
    for (int copy = 1; copy < count_; ++copy) {
      copy_regions(copy);
      for (auto* const lists : {&graph_.together_, &graph_.apart_})
        for (size_t i = 0, count = lists->size(); i < count; ++i)
          if (const auto list = (*lists)[i]; all_inside(list)) lists->push_back(all_of(copy, list));
    }
    copy_trades();
    keep_equal();
  }

 private:
  void want(bool right, const auto&... what) const {
    if (!right) fail(Kind::Config, "'", name_, "': ", what...);
  }
  bool inside(int node) const { return std::ranges::binary_search(inside_, node); }
  bool all_inside(const std::vector<int>& nodes) const {
    return std::ranges::all_of(nodes, [&](int node) { return inside(node); });
  }
  int of(int copy, int node) const {
    const auto place = std::ranges::lower_bound(inside_, node) - inside_.begin();
    return copies_[size_t(copy)][size_t(place)];
  }
  std::vector<int> all_of(int copy, std::vector<int> nodes) const {
    for (int& node : nodes) node = of(copy, node);
    return nodes;
  }

  void check_devices() const {
    want(count_ >= 1 && !listed_.empty(),
         "it wants nodes, and devices = [[0, 1], [2, 3]]: a list for each copy");
    const int there = int(graph_.options_.devices.size());
    for (const auto& devices : devices_) {
      want(devices.size() == listed_.size(), "a copy wants a device for each of its ",
           listed_.size(), " nodes, got ", devices.size());
      for (const int device : devices)
        want(device >= 0 && device < there, "device ", device, ", and the flow has ", there,
             "; see flow.devices");
    }
  }

  void check_nodes() const {
    for (const int node : listed_) {
      const auto& own = graph_.nodes_[size_t(node)];
      want(!own.inputs.empty() && !own.outputs.empty(), "node '", own.name,
           "' cannot be copied: its rows come by an input and leave by an output");
      want(own.options.replicas.empty(), "node '", own.name,
           "' has replicas of its own; take one of the two");
    }
  }

  bool is_fed(int node) const {
    return std::ranges::any_of(graph_.edges_, [&](const Edge& edge) {
      return edge.to == node && edge.to_port == 0 && !edge.carried;
    });
  }

  void connect_chain() {
    for (size_t i = 0; i + 1 < listed_.size(); ++i) {
      const int from = listed_[i], to = listed_[i + 1];
      const auto joins_them = [&](const Edge& e) { return e.from == from && e.to == to; };
      if (!is_fed(to) && std::ranges::none_of(graph_.edges_, joins_them))
        graph_.connect({from, 0}, {to, 0}, {});
    }
  }

  // What belongs to the listed nodes alone goes with them: what Yoke has put between them, and the
  // regions that they make up.
  void close() {
    const auto& nodes = graph_.nodes_;
    std::vector<bool> in(nodes.size()), reached(graph_.regions_.size());
    for (const int node : listed_) in[size_t(node)] = true;
    whole_.assign(graph_.regions_.size(), true);
    for (size_t i = 0; i < nodes.size(); ++i)
      for (int at = nodes[i].region; at >= 0; at = graph_.regions_[size_t(at)].parent) {
        if (in[i]) reached[size_t(at)] = true;
        if (nodes[i].what.empty() && !in[i]) whole_[size_t(at)] = false;
      }
    for (size_t i = 0; i < whole_.size(); ++i) whole_[i] = whole_[i] && reached[i];
    // All of Yoke's own at first, then without those that have to do with others.
    const auto is_own = [&](const Node& node) {
      return !node.what.empty() && node.feeds.empty() && node.gives.empty();
    };
    const auto listed = in;
    for (size_t i = 0; i < nodes.size(); ++i) in[i] = in[i] || is_own(nodes[i]);
    for (bool shrunk = true; shrunk;) {
      shrunk = false;
      for (size_t i = 0; i < nodes.size(); ++i) {
        if (!in[i] || listed[i] || between(int(i), in)) continue;
        if (nodes[i].region >= 0 && whole_[size_t(nodes[i].region)]) continue;
        in[i] = false;
        shrunk = true;
      }
    }
    for (size_t i = 0; i < nodes.size(); ++i)
      if (in[i]) inside_.push_back(int(i));
  }

  bool between(int node, const std::vector<bool>& in) const {
    bool gives = false, takes = false;
    for (const auto& edge : graph_.edges_) {
      if (edge.to != node && edge.from != node) continue;
      (edge.to == node ? takes : gives) = true;
      if (!in[size_t(edge.to == node ? edge.from : edge.to)]) return false;
    }
    for (size_t i = 0; i < whole_.size(); ++i)
      if (graph_.regions_[i].decides.first == node) {
        gives = true;
        if (!whole_[i]) return false;
      }
    return gives && takes;
  }

  // Where the copies stand: in the region that they do not make up themselves.
  void find_level() {
    last_ = listed_.back();
    for (const int node : listed_) {
      const auto& own = graph_.nodes_[size_t(node)];
      const auto& owner = own.options.weights_of;
      want(owner.empty() || own.options.role != Role::Train || inside(graph_.find(owner)), "node '",
           own.name, "' is trained with the weights of '", owner,
           "', which is not copied; name that too");
      std::pair<int, int> at(own.region, own.arm);
      while (at.first >= 0 && whole_[size_t(at.first)]) {
        const auto& region = graph_.regions_[size_t(at.first)];
        if (node == listed_.back() && !region.ends.empty()) last_ = region.ends[0];
        at = {region.parent, region.parent_arm};
      }
      if (node == listed_[0]) level_ = at;
      want(at == level_, "node '", own.name, "' is in another loop, branch or arm than '",
           graph_.nodes_[size_t(listed_[0])].name, "'; copies are made of all nodes of a loop or ",
           "branch, or of some that stand side by side in it");
    }
    for (size_t i = 0; i < whole_.size(); ++i) {
      const auto& region = graph_.regions_[i];
      const int decides = region.decides.first;
      if (whole_[i] || decides < 0 || !inside(decides)) continue;
      fail(Kind::Config, "'", name_, "': node '", graph_.nodes_[size_t(decides)].name,
           "' decides for '", region.name, "', and there is one of it for each copy; list all ",
           "nodes of '", region.name, "' too");
    }
  }

  void copy_nodes() {
    copies_.assign(size_t(count_), inside_);
    // What nobody listed goes where its neighbours are.
    const auto device_of = [&](int copy, int node) {
      const auto at = size_t(std::ranges::find(listed_, node) - listed_.begin());
      return at < listed_.size() ? devices_[size_t(copy)][at] : -1;
    };
    for (const int original : inside_) {
      auto& node = graph_.nodes_[size_t(original)];
      node.options.device = device_of(0, original);
      node.within = {};
      if (node.options.loss.empty()) continue;
      has_loss_ = true;
      node.loss_part /= count_;
    }
    for (int copy = 1; copy < count_; ++copy)
      for (size_t i = 0; i < inside_.size(); ++i) {
        Node node = graph_.nodes_[size_t(inside_[i])];
        node.options.device = device_of(copy, inside_[i]);
        node.name = cat(node.name, "@", copy);
        node.copy_of = inside_[i];
        auto& owner = node.options.weights_of;
        if (!owner.empty() && inside(graph_.find(owner))) owner += cat("@", copy);
        copies_[size_t(copy)][i] = graph_.add(std::move(node));
      }
  }

  // An end that faces outwards is cut or joined once, however many edges are at it.
  using Ends = std::map<std::pair<int, int>, int>;
  int at_end(Ends& ends, int node, int port, const std::string& others, Node made) {
    const auto [found, fresh] = ends.try_emplace({node, port}, -1);
    if (!fresh) return found->second;
    made.name = ends.size() == 1 ? made.name : cat(name_, others, ends.size() - 1);
    std::tie(made.region, made.arm) = level_;
    const bool cuts = &ends == &cut_;
    found->second = graph_.add(std::move(made));
    for (int copy = 0; copy < count_; ++copy) {
      const End between{found->second, copy}, own{of(copy, node), port};
      cuts ? graph_.connect(between, own, {}) : graph_.connect(own, between, {});
    }
    return found->second;
  }
  int splitter(int node, int port) {
    return at_end(cut_, node, port, "-split",
                  {.name = name_ + "-split",
                   .open = splits(count_, has_loss_),
                   .options = {.device = devices_[0][0],
                               .inputs = {"x"},
                               .outputs = numbered("y", size_t(count_))},
                   .what = "split"});
  }
  int joiner(int node, int port) {
    return at_end(joined_, node, port, "-join",
                  {.name = name_,
                   .open = joins("concat"),
                   .options = {.device = devices_[0].back(),
                               .inputs = numbered("x", size_t(count_)),
                               .outputs = {"y"}},
                   .what = "concat"});
  }

  void copy_edges() {
    for (auto edge : std::exchange(graph_.edges_, {})) {
      const bool from = inside(edge.from), to = inside(edge.to);
      if (from && to) {
        copy_edge(edge);
        continue;
      }
      if (to) {
        edge.to = splitter(edge.to, edge.to_port);
        edge.to_port = 0;
      } else if (from) {
        edge.from = joiner(edge.from, edge.from_port);
        edge.from_port = 0;
      }
      graph_.edges_.push_back(edge);
    }
  }

  void copy_edge(const Edge& edge) {
    for (int copy = 0; copy < count_; ++copy) {
      auto own = edge;
      own.from = of(copy, edge.from);
      own.to = of(copy, edge.to);
      if (auto& shape = own.options.initial_shape; !shape.empty() && shape[0] > 1) {
        want(shape[0] % count_ == 0, "initial_shape of the edge to '",
             graph_.nodes_[size_t(edge.to)].name, "' has ", shape[0], " rows, which ", count_,
             " copies do not share evenly");
        shape[0] /= count_;
      }
      graph_.edges_.push_back(own);
    }
  }

  void name_ports() {
    const auto is_cut = cut_.contains({listed_[0], 0});
    if (is_cut || !is_fed(listed_[0]))
      graph_.also_[cat(">", name_, ".x")] = graph_.nodes_[size_t(splitter(listed_[0], 0))].name;
    if (graph_.nodes_[size_t(last_)].options.loss.empty())
      graph_.also_[cat("<", name_, ".y")] = graph_.nodes_[size_t(joiner(last_, 0))].name;
  }

  // The regions of a copy's nodes, for itself: they turn and choose by its own rows.
  void copy_regions(int copy) {
    auto& regions = graph_.regions_;
    std::map<int, int> own;
    for (size_t i = 0; i < whole_.size(); ++i)
      if (whole_[i]) own[int(i)] = int(regions.size() + own.size());
    const auto of_copy = [&](int region) {
      const auto found = own.find(region);
      return found == own.end() ? region : found->second;
    };
    for (const auto& [from, to] : own) {
      auto region = regions[size_t(from)];
      region.name += cat("@", copy);
      region.parent = of_copy(region.parent);
      if (int& decides = region.decides.first; decides >= 0 && inside(decides))
        decides = of(copy, decides);
      region.ends = all_of(copy, region.ends);
      regions.push_back(std::move(region));
    }
    for (const int node : copies_[size_t(copy)]) {
      int& region = graph_.nodes_[size_t(node)].region;
      region = of_copy(region);
    }
  }

  // Models that trade do so in each copy.
  void copy_trades() {
    for (size_t i = 0, count = graph_.exchanges_.size(); i < count; ++i) {
      if (graph_.exchanges_[i].copies || !all_inside(graph_.exchanges_[i].nodes)) continue;
      graph_.exchanges_[i].in_copies = true;
      for (int copy = 1; copy < count_; ++copy) {
        auto own = graph_.exchanges_[i];
        own.name += cat("@", copy);
        own.nodes = all_of(copy, own.nodes);
        if (own.source >= 0) own.source = of(copy, own.source);
        graph_.exchanges_.push_back(std::move(own));
      }
    }
  }

  // By the sum of their gradients; the first weights are the first copy's by `copy_of`.
  void keep_equal() {
    for (const int node : inside_) {
      const auto& own = graph_.nodes_[size_t(node)];
      if (own.options.role != Role::Train || !own.options.weights_of.empty() || count_ == 1)
        continue;
      Exchange exchange{.what = Exchange::What::Gradients,
                        .name = cat("gradients of ", own.name),
                        .sum = true,
                        .copies = true};
      for (int copy = 0; copy < count_; ++copy) exchange.nodes.push_back(of(copy, node));
      graph_.exchanges_.push_back(std::move(exchange));
    }
  }

  Graph& graph_;
  const std::string& name_;
  const std::vector<std::vector<int>>& devices_;  // of each copy's listed nodes
  const int count_;
  const std::vector<int> listed_;
  std::vector<int> inside_ = {};               // the listed and what belongs to them, ascending
  std::vector<bool> whole_ = {};               // regions that they make up
  std::vector<std::vector<int>> copies_ = {};  // of inside_
  std::pair<int, int> level_ = {-1, 0};        // region and arm
  int last_ = -1;                              // whose first output is "NAME.y"
  bool has_loss_ = false;
  Ends cut_ = {}, joined_ = {};
};

void Graph::data_parallel(const std::string& name, const Split& options) {
  Copies(*this, name, options).make();
}

}  // namespace yoke::flow
