// SPDX-License-Identifier: Apache-2.0
// From a graph to what each device does: nodes get their devices, rates become numbers of firings,
// one order of everything is found, and every operation is put at the end of its queue's row, a
// message or meeting into all rows that it concerns at once. The rows are a plan::Program, which is
// proved, drawn and simulated there; beside each operation lies what the executor has to know.
#pragma once

#include "yoke/flow/graph.h"
#include "yoke/plan/program.h"
#include "yoke/plan/prove.h"

namespace yoke::flow {

// What an operation does.
struct Task {
  enum class Kind { Forward, Backward, Step, Send, Recv, Trade, Barrier, Loop, Branch };
  Kind kind = Kind::Forward;
  int node = -1;                // Forward, Backward, Step
  std::vector<int> nodes = {};  // Trade: those of this queue
  int exchange = -1;            // Trade
  int edge = -1;                // Send, Recv
  bool gradient = false;        // Send, Recv: of the edge's gradients
  int region = -1;              // Loop, Branch
  bool decides = false;         // Loop, Branch: this queue knows which way
  // Beside the operation's takes and gives: Forward's input and output ports; Backward's output
  // ports (their gradients come) and input ports (theirs go).
  std::vector<int> take_ports = {}, give_ports = {};
  std::vector<int> take_edges = {}, give_edges = {};
  // Loop, Branch: where in a part each value taken goes, and where each given comes from, by arm.
  struct Inner {
    int arm = 0, channel = -1;
    bool carried = false;
  };
  std::vector<Inner> enters = {};
  std::vector<std::vector<Inner>> leaves = {};
  int decider_channel = -1;  // Loop: in its part; Branch: place among the takes; -1: it counts
};
struct Tasks {
  std::vector<std::vector<Task>> rows = {};  // as Program::rows
  std::vector<Tasks> parts = {};
};

struct Compiled {
  Graph graph;
  plan::Program program = {};
  Tasks tasks = {};
  std::vector<int> queue_of = {};              // by node
  std::vector<int64_t> firings = {};           // by node, in a round
  std::vector<Body> bodies = {};               // by node; those of one weights_of share weights
  std::vector<std::vector<int>> carries = {};  // by node: input ports whose gradients go back
  std::vector<bool> trains = {};               // by node: gradients pass it
  // How a table for people puts it: nodes, devices, memory.
  std::string placement() const;
  // What may not be meant.
  std::vector<std::string> warnings() const;
  std::string verdict() const;  // "deadlock-free", "deadlock-free, not deterministic"
  std::optional<plan::Knot> knot(const plan::ProveOptions& options = {}) const;
};

// Throws Kind::Config where the graph makes no sense; whether it can get stuck is for knot().
Compiled compile(Graph graph);
// Throws Kind::Config with the circle and what to do about it.
void check(const Compiled& compiled);

}  // namespace yoke::flow
