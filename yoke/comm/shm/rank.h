// SPDX-License-Identifier: Apache-2.0
// One rank of the shm backend: what it has in flight in all of its groups. There are no helper
// threads: work is done where the rank calls or waits, and while it waits in one group it goes on
// with the others. A doorbell in shared memory wakes it. Threads: the rank's own.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "yoke/base/event_count.h"
#include "yoke/comm/local/jobs.h"
#include "yoke/comm/shm/board.h"
#include "yoke/comm/world.h"

namespace yoke::comm {

class ShmRank;

// An operation of one rank in flight.
struct ShmPending {
  Operation part;
  uint64_t sequence = 0;  // of the group's collectives, or of the pair's messages
  uint64_t ticket = 0;
  OpKind kind = OpKind::Barrier;
  int peer = -1;  // of a message, in the group
  bool published = false;
  std::atomic<bool> done = false;
  // Private tensors and their places in shared memory.
  struct Stage {
    at::Tensor tensor;
    void* place;
    bool in, out;
  };
  std::vector<Stage> stages = {};
  Location formed = {};           // by a split, with
  std::vector<int> members = {};  // those who are in it, as this group counts

  bool message() const { return kind == OpKind::Send || kind == OpKind::Recv; }
};

class ShmGroup {
 public:
  ShmGroup(ShmRank& owner, std::string name, std::vector<int> members, int rank, Board board);
  ~ShmGroup();

  int rank() const { return rank_; }
  int size() const { return int(members_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int>& members() const { return members_; }  // as the world counts
  int world_rank(int rank) const { return members_[size_t(rank)]; }
  bool idle() const { return collectives_.empty() && num_messages_ == 0; }

  std::shared_ptr<ShmPending> post(Operation part);
  // Takes whatever steps can be taken; true if there were any.
  bool progress(bool steal);
  // Members that it still waits for, as the world counts.
  std::vector<int> missing_in(const ShmPending& pending) const;
  std::string text(const ShmPending& pending) const;  // "all_reduce #5 on world"
  void drop_what_waits_for_the_departed();

 private:
  struct Channel {  // to or from one peer
    std::deque<std::shared_ptr<ShmPending>> pending;
    uint64_t posted = 0;
  };

  // Collectives.
  bool publish();
  bool help(bool steal);
  bool start(uint64_t sequence);
  void finish(uint64_t sequence);
  bool retire();
  void form_groups(uint64_t sequence);
  const CpuItems& items_of(uint64_t sequence);
  std::string conflict_in(uint64_t sequence, const Operation& mine);

  // Messages.
  bool publish_sends(int peer, Channel& channel);
  bool take_messages(int peer, Channel& channel);

  void stage(ShmPending& pending);
  std::vector<Location> places_of(const ShmPending& pending) const;
  void settle(ShmPending& pending);  // its result is there
  void ring_all() const;
  [[noreturn]] void call_off(Kind kind, const std::string& what);

  ShmRank& owner_;
  const std::string name_;
  const std::vector<int> members_;
  const int rank_;
  const uint32_t id_;
  const Board board_;
  uint64_t posted_ = 0;
  std::deque<std::shared_ptr<ShmPending>> collectives_;  // posted and not retired, in order
  std::map<int, Channel> sends_, recvs_;                 // by peer
  size_t num_messages_ = 0;
  CpuItems items_;  // of the collective #items_of_ - 1
  uint64_t items_of_ = 0;
};

class ShmRank {
 public:
  ShmRank(std::shared_ptr<World> world, std::shared_ptr<SharedMemory> memory, int rank);

  World& world() const { return *world_; }
  SharedMemory& memory() const { return *memory_; }
  const std::shared_ptr<SharedMemory>& shared_memory() const { return memory_; }
  int rank() const { return rank_; }
  // The bells of all ranks lie at the start of the root, before the board of the world.
  EventCount& bell(int rank) const;
  static size_t bells_bytes(int size) { return size_t(size) * 64; }

  std::shared_ptr<ShmGroup> add_group(const std::string& name, std::vector<int> members, int rank,
                                      Board board);
  void wait(const ShmGroup& group, const ShmPending& pending);
  bool progress(bool steal);
  // The rank returns: what others need of it is done first.
  void leave();
  // A board that this rank has made, to be freed when its users are gone.
  void keep(Board board, void* memory);

 private:
  void check_missing(const ShmGroup& group, const ShmPending& pending) const;

  const std::shared_ptr<World> world_;
  const std::shared_ptr<SharedMemory> memory_;
  const int rank_;
  std::shared_ptr<void> wake_token_;
  std::vector<std::shared_ptr<ShmGroup>> groups_;
  std::vector<std::pair<Board, void*>> boards_;
};

}  // namespace yoke::comm
