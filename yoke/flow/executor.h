// SPDX-License-Identifier: Apache-2.0
// Runs a flow that is proved free of deadlock: a thread for each queue walks its list of
// operations, round after round, and waits for values alone. A queue may be rounds ahead of
// another, as far as the edges between them hold values. The first failure ends the flow; its text
// names node, round and the shapes of what it was given. What waits longer than the deadline is
// such a failure too; a node that does not come back is told, and its thread left behind. After a
// failure the next round starts afresh, with the weights as they are. Owns: threads and values.
// Threads: one calls; stop() and halt() from any.
#pragma once

#include <functional>
#include <memory>

#include "yoke/base/clock.h"
#include "yoke/flow/compile.h"

namespace yoke::comm {
class World;
}
namespace yoke::observe {
class Tracer;
}

namespace yoke::flow {

struct RunOptions {
  Duration timeout = std::chrono::seconds(300);
  int threads_per_queue = 0;  // of LibTorch; 0: the cores divided
  bool pin = false;
  observe::Tracer* tracer = nullptr;  // on a GPU every operation is then waited for
  // Gets the ranks' world when threads start, for a view of what they do.
  std::function<void(std::shared_ptr<comm::World>)> on_world = nullptr;
  // A seam for tests: called by a queue's thread before each of its operations.
  std::function<void(int queue, const plan::Operation&)> before = nullptr;
};

// Where the time of the rounds went.
struct Report {
  struct OfNode {
    std::string name = {}, queue = {};
    int64_t firings = 0;
    double compute_s = 0, back_s = 0, step_s = 0;
    double wait_s = 0;   // for its values, and for room for what it gives
    bool loads = false;  // it has no inputs
  };
  struct OfEdge {
    std::string name = {};
    std::string queue = {};  // that takes, and spends the time that moving takes; none: several
    int64_t values = 0;
    uint64_t bytes = 0, lost = 0;
    double wait_s = 0;  // of who takes
    double room_s = 0;  // of who gives, for room
    double move_s = 0;  // copying
  };
  std::vector<OfNode> nodes = {};
  std::vector<OfEdge> edges = {};
  int64_t rounds = 0;
  double seconds = 0;
  // The node or edge that takes most of the time of the busiest queue, as a sentence.
  std::string bottleneck() const;
  std::string table() const;
  std::string json() const;
};
Report parse_report(const std::string& json);  // throws Kind::Io

class Executor {
 public:
  // Throws as check() does.
  explicit Executor(Compiled compiled, RunOptions options = {});
  // Stops what was submitted and not collected, and waits for operations under way no longer than
  // the timeout: the thread of one that does not come back is left behind.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // So many rounds of a flow without inputs; gives how many of them were made. Throws the first
  // failure. Rounds that were submitted and not collected are finished first, and forgotten.
  int64_t run(int64_t rounds);
  Tensors last() const;  // what its outputs gave in the last of them
  // One round: a value for each input of the graph, in their order, gives one for each output.
  Tensors step(const Tensors& inputs);
  // The same in two halves, so that rounds may follow each other closely. At most 64 may wait to be
  // collected: more is Kind::Usage.
  void submit(const Tensors& inputs);
  Tensors collect();

  // Lets run() return before its time, from another thread: after a round that all have made.
  void halt();
  // Ends a run from another thread: it throws Kind::Cancelled; so does one that begins after.
  void stop(const std::string& why);

  // Of a node with a loss, one for each round so far; waits for nothing but their device.
  std::vector<double> losses(const std::string& node) const;
  const std::vector<std::string>& inputs() const;
  const std::vector<std::string>& outputs() const;
  // Of the graph's own inputs and outputs.
  std::vector<plan::Port> input_ports() const;
  std::vector<plan::Port> output_ports() const;
  const Compiled& compiled() const;
  const Body& body(const std::string& node) const;                        // between rounds
  const std::vector<at::Tensor>& weights(const std::string& node) const;  // likewise
  void wait() const;       // until all rounds are done; throws the first failure
  bool done() const;       // they are
  bool lost() const;       // a node has not come back, and nothing goes on any more
  int64_t rounds() const;  // that are done so far; from any thread
  Report report() const;   // likewise

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::flow
