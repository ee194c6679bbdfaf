// SPDX-License-Identifier: Apache-2.0
// The engine of the local backend: what the rank threads of one group share. Collectives form a
// queue; the one at its head runs as soon as every rank has posted it. There are no helper threads:
// its items are claimed by the ranks that post or wait, each its own share first, and a rank that
// waits also takes what a busy peer has left undone. Messages are copied by whichever side comes
// second. CUDA tensors go through a CudaLane: the last rank to come enqueues the whole operation.
// Threads: all ranks.
#pragma once

#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "yoke/base/event_count.h"
#include "yoke/base/mutex.h"
#include "yoke/comm/local/pending.h"
#include "yoke/comm/world.h"

namespace yoke::comm {

class LocalGroup {
 public:
  static std::shared_ptr<LocalGroup> make(std::shared_ptr<World> world, std::string name,
                                          std::vector<int> members);
  ~LocalGroup();

  int size() const { return int(members_.size()); }
  const std::string& name() const { return name_; }
  World& world() const { return *world_; }
  int world_rank(int rank) const { return members_[size_t(rank)]; }

  std::shared_ptr<Pending> post(int rank, Operation part);
  // Blocks the host until it is over (CUDA: or only enqueued), helping meanwhile.
  enum class Until { Enqueued, Over };
  void wait(int rank, const Pending& pending, Until until = Until::Over);
  // CUDA: makes the caller's current stream wait until it is over.
  void stream_wait(int rank, const Pending& pending, at::Device device);
  // The group of those who gave the same color, and this rank's number in it.
  std::pair<std::shared_ptr<LocalGroup>, int> split(int rank, int color, int key);

 private:
  struct Channel {  // at most one of the two queues holds anything
    std::deque<std::shared_ptr<Message>> sends, recvs;
    uint64_t num_sends = 0, num_recvs = 0;
    std::unique_ptr<CudaLane> lane;
  };
  struct Watched {  // a CUDA operation, whose deadline no host thread keeps by waiting
    std::shared_ptr<Pending> pending;
    Time deadline;
  };

  LocalGroup(std::shared_ptr<World> world, std::string name, std::vector<int> members);
  // Fails the world on behalf of `rank`, and throws.
  [[noreturn]] void call_off(int rank, Kind kind, const std::string& what);
  // Runs a step of operations in flight. If it throws, nobody shall count on them any more.
  template <typename Step>
  void carry_out(int rank, std::initializer_list<Pending*> operations, Step step) {
    try {
      step();
    } catch (const std::exception& error) {
      for (Pending* operation : operations)
        operation->stage.store(Pending::Stage::Open, std::memory_order_release);
      call_off(rank, Kind::Comm,
               cat((*operations.begin())->text(), " on ", name_, " broke off: ", error.what()));
    }
  }

  // group.cpp: collectives
  std::shared_ptr<Collective> post_collective(int rank, Operation part);
  bool help(int rank, bool steal);
  void start(int rank, Collective& op);
  void finish(int rank, Collective& op);
  void settle_head() YOKE_REQUIRES(mutex_);
  void form_groups(Collective& op);

  // messages.cpp: point to point
  std::shared_ptr<Message> post_message(int rank, Operation part);
  void deliver(int rank, Message& send, Message& recv);

  // waiting.cpp: deadlines
  void check_missing(int rank, const Pending& pending);
  std::vector<int> missing_in(const Pending& pending) YOKE_EXCLUDES(mutex_);
  std::string lateness(const Pending& pending);
  void watch(std::shared_ptr<Pending> pending) YOKE_REQUIRES(mutex_);
  void collect() YOKE_REQUIRES(mutex_);
  void watchdog(const std::stop_token& stop);

  const std::shared_ptr<World> world_;
  const std::string name_;
  const std::vector<int> members_;  // world ranks
  const uint32_t id_;
  std::shared_ptr<void> wake_token_;
  // On cache lines of their own: those who wait read them without end.
  alignas(64) EventCount changed_;
  // claimable_: shares of the head that have items left; 1 when it is yet to be started.
  alignas(64) std::atomic<int> claimable_{0};
  alignas(64) Mutex mutex_;
  uint64_t completed_ YOKE_GUARDED_BY(mutex_) = 0;        // collectives that have left the queue
  std::vector<uint64_t> posted_ YOKE_GUARDED_BY(mutex_);  // collectives, by rank
  std::deque<std::shared_ptr<Collective>> queue_ YOKE_GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, Channel> channels_ YOKE_GUARDED_BY(mutex_);  // (sender, receiver)
  std::unique_ptr<CudaLane> lane_ YOKE_GUARDED_BY(mutex_);
  std::deque<Watched> watched_ YOKE_GUARDED_BY(mutex_);
  std::jthread watchdog_;
};

// The copies around an operation, on the CPU.
void run_copies(const std::vector<Operation::Copy>& copies);

}  // namespace yoke::comm
