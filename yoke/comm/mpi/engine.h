// SPDX-License-Identifier: Apache-2.0
// One rank's end of the mpi backend: its operations in flight, of all its groups. An operation is a
// list of steps; each starts transfers, and the next begins when they are done. There is no helper
// thread: whatever is in flight moves on whenever the rank calls, asks or waits, for any group.
// Owns: the channel to the other ranks. Threads: one at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "yoke/comm/mpi/channel.h"
#include "yoke/comm/operation.h"
#include "yoke/comm/world.h"

namespace yoke::comm {

struct MpiGroup {
  std::string name;
  uint32_t id;               // in the flight recorder
  std::vector<int> members;  // world ranks
  int rank;                  // this one's, among the members
  int context;  // keeps its transfers apart from those of other groups of the same ranks
  uint64_t num_collectives = 0;
  std::vector<uint64_t> num_sends = {}, num_recvs = {};  // to and from each member

  int size() const { return int(members.size()); }
};

struct MpiTask {
  // Tasks of one line of a group run one after the other; the sends form none.
  static constexpr int kNoLine = -1, kCollectives = -2;

  MpiTask(Operation operation, std::shared_ptr<MpiGroup> of)
      : part(std::move(operation)), kind(part.kind), group(std::move(of)) {}
  std::string text() const;  // "all_reduce #5", "recv #0 from rank 1"

  Operation part;
  const OpKind kind;
  const std::shared_ptr<MpiGroup> group;
  int line = kNoLine;  // a member's number: the recvs from it
  uint64_t sequence = 0, ticket = 0;
  std::vector<std::function<void()>> steps = {};
  size_t next_step = 0;
  MpiTransfers transfers = {};
  at::Tensor scratch = {};
  bool met = false;                            // a message: the other side is known to have come
  std::shared_ptr<MpiGroup> formed = nullptr;  // by a split
  bool done = false;
};

class MpiRank {
 public:
  MpiRank(std::shared_ptr<World> world, std::shared_ptr<MpiChannel> channel);
  ~MpiRank();

  int rank() const { return rank_; }
  World& world() const { return *world_; }
  const MpiChannel& channel() const { return *channel_; }

  std::shared_ptr<MpiGroup> form_group(std::string name, std::vector<int> members, int context);
  // A group's context must be new to all its members: the largest of what they propose here.
  int next_context() const { return next_context_; }

  std::shared_ptr<MpiTask> post(const std::shared_ptr<MpiGroup>& group, Operation part);
  void wait(const MpiTask& task);
  // Moves everything on a little, so that asking again and again is enough. Never throws: what goes
  // wrong fails the world.
  bool poll(const MpiTask& task);

  // Sees to it that what peers wait for gets to them, as long as the world lives.
  void leave();

  // Fails the world on behalf of `rank`, and throws.
  [[noreturn]] void call_off(int rank, Kind kind, const std::string& what);
  // Uninitialised bytes for the task, until it is done.
  Bytes scratch(MpiTask& task, size_t bytes);

 private:
  void progress();
  bool advance(MpiTask& task);
  void finish(MpiTask& task);
  // Until it is done. Gives up with a complaint when it needs a rank that has left.
  std::optional<std::string> await(const MpiTask& task);
  std::optional<std::string> complaint(const MpiTask& task);
  std::vector<int> missing_in(const MpiTask& task) const;

  const std::shared_ptr<World> world_;
  const std::shared_ptr<MpiChannel> channel_;
  const int rank_;
  const bool crowded_;  // more ranks than cores on this host
  int next_context_ = 0;
  std::vector<std::shared_ptr<MpiTask>> live_;               // in the order of the calls
  std::vector<std::pair<const MpiGroup*, int>> busy_lines_;  // of progress(), to save its memory
  at::Tensor spare_;                                         // the scratch of a task that is over
};

// In steps.cpp: the steps of task.part, the copies before and after included. They refer to both
// arguments.
std::vector<std::function<void()>> steps_of(MpiRank& rank, MpiTask& task);

}  // namespace yoke::comm
