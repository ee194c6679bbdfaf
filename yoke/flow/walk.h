// SPDX-License-Identifier: Apache-2.0
// One queue's walk along its row of operations. Threads: the queue's.
#pragma once

#include "yoke/flow/queue_run.h"
#include "yoke/observe/trace.h"

namespace yoke::flow {

std::string describe(const at::Tensor& tensor);  // "FP32[2,3]"
std::string describe(const Tensors& values);     // of many the first

class Walk {
 public:
  Walk(Run& run, comm::Communicator world, comm::World& whole);
  void row(int64_t round);

 private:
  // A level as this queue sees it.
  struct Level {
    const plan::Program& program;
    const Tasks& tasks;
    Pipes& pipes;
    std::vector<comm::Communicator> groups = {};
    std::vector<const char*> names = {};  // of the operations, for as long as the run
    std::vector<Level> parts = {};
    const std::vector<int>& queues(const plan::Operation& operation) const {
      return program.groups[size_t(operation.group)].queues;
    }
  };
  // While it lives, this queue waits for those.
  struct Awaits {
    Awaits(Walk& of, const std::vector<int>& queues) : walk(of) {
      walk.run_.awaited[size_t(walk.me_)] = &queues;
    }
    ~Awaits() {
      walk.run_.waited_until[size_t(walk.me_)] = walk.clock_.now();
      walk.run_.awaited[size_t(walk.me_)] = nullptr;
    }
    Awaits(const Awaits&) = delete;
    Awaits& operator=(const Awaits&) = delete;
    Walk& walk;
  };
  Level enter(const plan::Program& program, const Tasks& tasks, Pipes& pipes);
  void row(Level& level);
  void perform(Level& level, const plan::Operation& operation, const Task& task, const char* name);

  void forward(Level& level, const plan::Operation& operation, const Task& task, const char* name);
  void backward(Level& level, const plan::Operation& operation, const Task& task, const char* name);
  void step(const Task& task, const char* name);
  void send(Level& level, const plan::Operation& operation);
  double receive(Level& level, const plan::Operation& operation);  // seconds of its values' way
  void trade(Level& level, const plan::Operation& operation, const Task& task);
  void loop(Level& level, const plan::Operation& operation, const Task& task);
  void branch(Level& level, const plan::Operation& operation, const Task& task);

  // Until every channel has what the operation takes, or room for what it gives.
  void await_values(Level& level, const plan::Operation& operation, const Task& task);
  void await_room(Level& level, const plan::Operation& operation, const Task& task);
  template <typename Ready>
  double await(const Ready& ready, int other, const std::string& channel, const char* what);
  Value take(Level& level, int channel);
  void give(Level& level, int channel, Value value);
  at::Tensor arrive(Value value, EdgeState& edge, const Edge* options);
  void await_stream(const Value& value) const;  // what follows in this queue's stream sees it
  at::Tensor owned(const at::Tensor& tensor, long held) const;
  // The end of an operation that began then: waited for on a GPU where it is traced.
  Time ended(const char* name, observe::Category category, Time begin) const;
  // With the others of a loop, a branch or the phases.
  void meet(const std::vector<int>& queues, const Task& task, const std::function<void()>& meeting);
  bool decide(Level& level, const plan::Operation& operation, const Task& task, const Value& value);
  template <typename Compute>
  void guarded(const Task& task, const Tensors& inputs, const Compute& compute);
  // In a handler: the same error, with who met it, in which round, and the shapes concerned.
  [[noreturn]] void retell(const std::string& who, const std::string& given,
                           const std::string& where = {}) const;
  EdgeState* edge_state(const Task& task, size_t place, bool given);

  Run& run_;
  const comm::Communicator world_;
  comm::World& whole_;
  const int me_;
  const at::Device device_;
  const SteadyClock clock_{};
  int64_t round_ = 0;
  uint32_t flights_ = 0;
  Level top_;
};

}  // namespace yoke::flow
