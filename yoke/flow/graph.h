// SPDX-License-Identifier: Apache-2.0
// Several models that work together: nodes that compute, edges that carry values from one's output
// to another's input, and the patterns that people know, each a few nodes and edges of the same
// kind. A round fires every node as often as the rates of its ports say, once where they say
// nothing. compile.h makes the lists of operations of it, and proves them.
//
//   Graph graph({.devices = topo::parse_devices("cpu:2")});
//   graph.node("a", file("a.pt"), {.device = 0, .inputs = {"x:FP32[b,4]"}});
//   graph.node("b", file("b.pt"), {.device = 1});
//   graph.edge("a", "b");
//
// The words are those of a flow's TOML file (config.h). All errors are Kind::Config, and name
// nodes. Values; Threads: one.
#pragma once

#include <limits>
#include <map>
#include <optional>

#include "yoke/flow/body.h"
#include "yoke/topo/device.h"
#include "yoke/topo/host.h"

namespace yoke::flow {

enum class Role { Infer, Train, Frozen };
enum class Transport { Auto, Alias, Copy, Send, Host };
enum class Policy { Block, Latest, Drop };

struct OptimizerOptions {
  enum class Kind { Sgd, AdamW } kind = Kind::Sgd;
  double lr = 0.1, momentum = 0, weight_decay = 0;
};

struct NodeOptions {
  int device = -1;                 // place in Graph's devices; -1: chosen
  std::vector<int> replicas = {};  // several: rows are cut over a copy on each
  Role role = Role::Infer;
  // Ports as "x:FP32[b,4]" or a name alone; "2*x" takes or gives two values a firing: two that come
  // are joined along their rows, and what leaves is cut. None: as the body knows them, else x and
  // y.
  std::vector<std::string> inputs = {}, outputs = {};
  OptimizerOptions optimizer = {};  // of Role::Train
  std::string loss = {};            // an output that is made small, a number
  std::string weights_of =
      {};                 // computes with the weights of that node, on its device; trained: for it
  int phase = 0;          // nodes of a later phase start when all before is done
  bool in_place = false;  // writes into its first input
  double ms = 0;          // of a firing, where it is known: for the simulation
};

struct EdgeOptions {
  int64_t capacity = 0;  // values that wait at most; 0: what a round needs, and as much again
  Transport transport = Transport::Auto;
  std::optional<bool> gradients = {};  // none said: where both ends are trained or between
  Policy policy = Policy::Block;
  int64_t staleness = 0;                    // rounds of delay, exactly
  double initial = 0;                       // of the values that are there before the first round
  std::vector<int64_t> initial_shape = {};  // of them, where the ports leave it open
  int64_t every = 1;                        // rounds; in between the last value is taken again
};

struct Port {
  plan::Port port = {};  // without a shape where only the name is known
  bool declared = false;
  int64_t tokens = 1;
};

struct Node {
  std::string name = {};
  Open open = nullptr;
  NodeOptions options = {};
  std::vector<Port> inputs = {}, outputs = {};
  int region = -1, arm = 0;            // of Graph::regions
  int copy_of = -1;                    // the node whose weights it begins with
  double loss_part = 1;                // of the loss that is made small: a mean over copies
  std::vector<int> within = {};        // devices that it may be put on; none: all
  std::string feeds = {}, gives = {};  // of a graph's own input or output: its name
  std::string what = {};               // for people: "mlp 4,32,3"
};

struct Edge {
  int from = 0, from_port = 0, to = 0, to_port = 0;
  EdgeOptions options = {};
  bool carried = false;  // from one turn of a loop to the next
};

// Several copies of a model that trade what they know; or one that gives its weights to others.
struct Exchange {
  enum class What { Weights, Gradients } what = What::Weights;
  std::string name = {};
  std::vector<int> nodes = {};
  int source = -1;    // its weights alone; -1: the mean (or sum) of all
  bool ring = false;  // of its own and those of the one before alone
  bool sum = false;
  bool copies = false;     // of one node, that stay equal
  bool in_copies = false;  // of several nodes, all of one copy of them
  int64_t every = 1, staleness = 0;
};

struct Region {
  enum class Kind { Loop, Branch } kind = Kind::Loop;
  std::string name = {};
  int parent = -1, parent_arm = 0;
  int num_nodes = 0;  // that were put into it, but for what Yoke adds
  std::pair<int, int> decides = {-1,
                                 -1};  // node and output port: a loop's `until`, a branch's `when`
  int64_t most = 0;                    // turns of a loop
  std::vector<int> ends = {};          // of a branch, by arm: whose output leaves it
};

struct GraphOptions {
  std::string name = "flow";
  std::vector<topo::Device> devices = {topo::Device{}};
  uint64_t seed = 1;
  double memory_gb = 0;                              // of each device; 0: what it has
  std::shared_ptr<const topo::Host> host = nullptr;  // none: this one, with all its GPUs
};

class Graph {
 public:
  explicit Graph(GraphOptions options = {});

  int node(const std::string& name, Open open, NodeOptions options = {});
  // "a.y" or, where it is the only or first port, "a".
  void edge(const std::string& from, const std::string& to, EdgeOptions options = {});
  // What whoever runs the graph gives to it and gets from it, under the port's name. An input may
  // be fanned out; `ports`: "x:FP32[b,4]".
  void input(const std::string& port, const std::vector<std::string>& to, int device = -1);
  void output(const std::string& port, const std::string& from, int device = -1);

  // The same input to all, merged into one output "NAME.y": mean, vote (of class numbers, or of the
  // largest of a row), stack, weighted, or a node of one's own with an input for each.
  struct Ensemble {
    std::vector<std::string> nodes = {};
    std::string merge = "mean";
    std::vector<double> weights = {};
    int device = -1;
    EdgeOptions edge = {};  // to the merge; of the input capacity, transport and gradients alone
  };
  void ensemble(const std::string& name, const std::string& input, const Ensemble& options);
  // Each one's first output to the next one's first input.
  void chain(const std::vector<std::string>& nodes, EdgeOptions options = {});

  // Models that trade outputs (or features: any output) each round, or every n rounds, or with the
  // values of s rounds ago: what the others gave comes, stacked, to `into`, one input for each. No
  // gradients cross.
  struct Trade {
    std::vector<std::string> from = {}, into = {};
    bool ring = false;  // each to the next alone
    EdgeOptions edge = {};
  };
  void exchange(const std::string& name, const Trade& options);
  // The same for weights or gradients: everyone gets the mean (or sum) of all, in a ring of its own
  // and the one before.
  void exchange(const Exchange& exchange, const std::vector<std::string>& nodes);
  void broadcast_weights(const std::string& source, const std::vector<std::string>& nodes,
                         int64_t every = 1);

  // The nodes run again and again, at most so many times, until the output `until` is not 0.
  // `carry`: from an output to an input whose first value comes from outside.
  struct Loop {
    std::vector<std::string> nodes = {};
    std::vector<std::pair<std::string, std::string>> carry = {};
    std::string until = {};
    int64_t most = 1;
  };
  void loop(const std::string& name, const Loop& options);  // none: it is given one
  // Where the output `when` is not 0 the nodes of `then` run, else those of `otherwise`; "NAME.y"
  // is what the outputs `then_gives` or `otherwise_gives` give.
  struct Branch {
    std::string when = {};
    std::vector<std::string> then = {}, otherwise = {};
    std::string then_gives = {}, otherwise_gives = {};
    int device = -1;
  };
  void branch(const std::string& name, const Branch& options);

  // The rows of what comes to the nodes from others are cut over copies of them on these devices,
  // one list for each copy, and what they give to others is joined; "NAME.x" is the first input of
  // the first, "NAME.y" what the last gives. One whose first input
  // nobody feeds follows the one before it. Loops, branches and exchanges that they make up are
  // each copy's own, for its rows; so this is told after them, and after the nodes' edges. Trained
  // copies keep equal weights by the sum of their gradients; a loss within them is the mean of
  // theirs.
  struct Split {
    std::vector<std::string> nodes = {};
    std::vector<std::vector<int>> devices = {};
  };
  void data_parallel(const std::string& name, const Split& options);
  // NAME.x and NAME.y, for edges that are told before copies are made of what is between the two.
  void name_ports(const std::string& name, const std::string& first, const std::string& last);
  // All nodes of another graph as NAME/node; its inputs and outputs are ports of NAME.
  void subgraph(const std::string& name, const Graph& graph, const std::vector<int>& devices = {});

  void colocate(const std::vector<std::string>& nodes);
  void separate(const std::vector<std::string>& nodes);
  Graph on_first_device() const;  // the same with all that it does at place 0

  const GraphOptions& options() const { return options_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  std::vector<Node>& mutable_nodes() { return nodes_; }  // for compile()
  const std::vector<Edge>& edges() const { return edges_; }
  const std::vector<Exchange>& exchanges() const { return exchanges_; }
  const std::vector<Region>& regions() const { return regions_; }
  const std::vector<std::vector<int>>& together() const { return together_; }
  const std::vector<std::vector<int>>& apart() const { return apart_; }
  int find(const std::string& name) const;  // throws with the nearest names

 private:
  class Copies;
  struct End {
    int node = 0, port = 0;
  };
  End end_of(const std::string& text, bool output);
  std::vector<int> find_all(const std::vector<std::string>& names) const;
  int add(Node node);
  void connect(End from, End to, const EdgeOptions& options);
  void enclose(const std::vector<std::string>& nodes, int region, int arm);

  GraphOptions options_;
  std::vector<Node> nodes_ = {};
  std::vector<Edge> edges_ = {};
  std::vector<Exchange> exchanges_ = {};
  std::vector<Region> regions_ = {};
  std::vector<std::vector<int>> together_ = {}, apart_ = {};
  std::map<std::string, std::string> also_ = {};  // ports of a pattern: "pair.x" is a node's
};

}  // namespace yoke::flow
