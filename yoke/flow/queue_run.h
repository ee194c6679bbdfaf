// SPDX-License-Identifier: Apache-2.0
// The run of a flow from inside: what all queues share, and the walk of one queue along its row.
// For executor.cpp alone.
#pragma once

#include <deque>
#include <optional>

#include "yoke/base/event_count.h"
#include "yoke/base/queue.h"
#include "yoke/comm/communicator.h"
#include "yoke/comm/world.h"
#include "yoke/flow/executor.h"
#include "yoke/flow/pipe.h"

namespace torch::optim {
class Optimizer;
}

namespace yoke::flow {

// What a node keeps; its queue's thread alone touches it.
struct NodeState {
  int64_t firing = 0;
  struct Saved {                       // of a firing whose backward is to come
    std::vector<Tensors> inputs = {};  // by port, by value: leaves
    Tensors outputs = {};
  };
  std::deque<Saved> saved = {};
  std::shared_ptr<torch::optim::Optimizer> optimizer = nullptr;
  bool shares = false;  // its body is another's too: the mode is set before each firing
  std::vector<double> losses = {};
  Tensors pending = {};                                // of a GPU: not read yet
  std::map<int, std::deque<at::Tensor>> history = {};  // given to each exchange, the oldest first
  Report::OfNode figures = {};
};

struct EdgeState {
  Transport transport = Transport::Alias;
  Value last = {};              // taken, where it may have to serve again
  Report::OfEdge figures = {};  // each field is written at one end alone
};

// The weights and floating-point buffers of a model, as they lie; and such a list as one row.
Tensors parts_of(const Body& body, bool weights, bool buffers);
at::Tensor flat(const Tensors& parts);

// A value as it leaves a stream: detached, and with the point after which it is there.
Value leave(const at::Tensor& tensor);

// The channels of a level while it runs.
struct Pipes {
  std::vector<std::unique_ptr<Pipe>> pipes = {};       // where somebody waits
  std::vector<std::unique_ptr<LoosePipe>> loose = {};  // where nobody does
  std::vector<Value> slots = {};                       // of one queue: held, or the last
  std::vector<int> giver = {}, taker = {};             // queues
  std::vector<Pipes> parts = {};
};

inline constexpr size_t kMostUnderWay = 64;  // rounds that were submitted and not collected

struct Run {
  Run(Compiled compiled, RunOptions options);

  void reset();
  void queue(comm::Communicator& world);
  void set_world(std::shared_ptr<comm::World> world);
  void stop(const std::string& why);
  std::optional<std::string> stopped() const;  // why, before or while it ran
  void forget_stop();
  // All of it has been put into streams; now it is there, and the host may read.
  void synchronize() const;
  // Why nothing goes on any more, and who is in what: a model's code that does not come back cannot
  // be ended. Nothing while operations begin and end.
  std::optional<std::string> stuck() const;
  // When an operation of the queue, or a wait in it, last began or ended.
  Time last_move(comm::World& world, int queue) const;
  // Whether that is within the timeout of the queue, or else of one that it waits for.
  bool moves(int queue) const;
  void wake_all();
  void add_rounds(int64_t rounds);
  void halt();  // no round begins but those that a queue has begun
  bool all_done() const;
  void add_time();                       // since the first of the rounds under way was asked for
  void arrive(Value& value) const;       // on the host's side
  std::vector<double> losses(int node);  // between rounds
  Report report() const;
  std::vector<plan::Port> ports(bool inputs) const;

  Compiled compiled;
  const RunOptions options;
  std::vector<std::string> input_names = {}, output_names = {};
  std::vector<std::unique_ptr<BoundedQueue<Value>>> feeds = {}, results = {};
  std::vector<Value> last_results = {};  // of rounds that run() makes; each its queue's
  std::atomic<bool> keeps_last{false};
  std::vector<NodeState> nodes;
  std::vector<EdgeState> edges, gradients;  // by edge
  std::vector<Report::OfEdge> trades;       // by exchange, then by queue
  std::vector<Report::OfEdge> meetings;     // by region, and of the phases; then by queue
  Pipes pipes = {};

  std::atomic<int64_t> target{0};
  std::vector<std::atomic<int64_t>> begun, done;  // rounds, by queue
  std::atomic<bool> ending{false}, finished{false};
  std::exception_ptr error = nullptr;   // once finished
  bool broken = false;                  // a round was not finished
  EventCount progress;                  // rounds are done, or all is over
  EventCount given;                     // an output has a value, or all is over
  std::vector<EventCount> wakes;        // by queue
  std::vector<std::vector<int>> alone;  // each queue as a list
  std::vector<std::atomic<const std::vector<int>*>> awaited;  // by queue, while it waits for others
  std::vector<std::atomic<Time>> waited_until;                // by queue, the last time that it did
  bool crowded = false;
  int64_t base = 0;  // the first round since the last reset
  Time began = {};
  double seconds = 0;

 private:
  std::shared_ptr<comm::World> world() const;

  mutable Mutex mutex_;
  std::shared_ptr<comm::World> world_ YOKE_GUARDED_BY(mutex_);
  std::shared_ptr<void> listens_ YOKE_GUARDED_BY(mutex_);
  std::optional<std::string> why_ YOKE_GUARDED_BY(mutex_);
  friend class Walk;
};

}  // namespace yoke::flow
