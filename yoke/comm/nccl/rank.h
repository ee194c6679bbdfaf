// SPDX-License-Identifier: Apache-2.0
// One rank's end of NCCL. NCCL wants one host thread for all communicators of a rank, while calls
// come from the rank's thread and from autograd's: so each rank has an issuing thread, which alone
// talks to NCCL. Callers only queue; the thread launches in call order, each group on a stream of
// its own, and looks after deadlines and errors. Every communicator is connected when it is made,
// so a launch does not wait for a peer (but with WorldOptions::check it does).
// Owns: the thread, the streams and the groups; groups live as long as the rank, because NCCL frees
// memory by waiting for the whole device, where a kernel may be waiting for this very rank.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "yoke/base/event_count.h"
#include "yoke/base/mutex.h"
#include "yoke/comm/nccl/pending.h"
#include "yoke/comm/work.h"
#include "yoke/comm/world.h"
#include "yoke/topo/device.h"

namespace yoke::comm {

// What the ranks of this process share. When the last one has gone, nothing of this world runs on
// the devices any more, and the communicators can be destroyed.
class NcclProcess {
 public:
  NcclProcess(std::shared_ptr<World> world, NcclApi api, std::vector<topo::Device> devices)
      : world(std::move(world)), api(std::move(api)), devices_(std::move(devices)) {}
  ~NcclProcess();

  uint32_t group_id(const std::string& name);
  void retire(NcclComm comm, NcclApi::Stream stream);

  bool share_a_gpu(int rank, int other) const;  // as the world counts
  void add_bell(std::shared_ptr<EventCount> bell);
  // How far the ranks have come with launching.
  void note_launch(const NcclCall& call, uint64_t sequence);
  bool have_launched(const std::vector<std::pair<NcclCall, uint64_t>>& calls);

  // Memory that NCCL can use without copies; null: it has none. What is given back is kept for the
  // same rank, whose stream is in order, and is not freed: that would wait for the whole device.
  struct Memory {
    void* begin = nullptr;
    bool fresh = false;
  };
  Memory take_memory(size_t bytes, int rank);
  void give_memory(void* memory);

  const std::shared_ptr<World> world;
  const NcclApi api;

 private:
  Mutex mutex_;
  const std::vector<topo::Device> devices_;  // of the ranks here
  std::vector<std::shared_ptr<EventCount>> bells_ YOKE_GUARDED_BY(mutex_);
  std::map<NcclCall, uint64_t> launched_ YOKE_GUARDED_BY(mutex_);  // the next number of each
  struct Block {
    size_t bytes;
    int rank;
    bool used;
  };
  std::map<void*, Block> blocks_ YOKE_GUARDED_BY(mutex_);
  std::map<std::string, uint32_t> ids_ YOKE_GUARDED_BY(mutex_);
  std::vector<NcclComm> comms_ YOKE_GUARDED_BY(mutex_);
  std::vector<NcclApi::Stream> streams_ YOKE_GUARDED_BY(mutex_);
};

class NcclRank {
 public:
  NcclRank(std::shared_ptr<NcclProcess> process, int rank, int device);
  ~NcclRank();  // waits for what was issued; never run by the issuing thread, which owns nothing

  World& world() const { return *process_->world; }
  const NcclApi& api() const { return process_->api; }
  int world_rank() const { return rank_; }

  // The group of all ranks, once they are connected.
  NcclGroup& await_world();
  std::shared_ptr<NcclPending> issue(NcclGroup& group, std::vector<Operation> operations);
  // The host waits until its own issuing thread has launched it, then the current stream until it
  // is over.
  void wait(const NcclPending& pending);
  void await_launch(const NcclPending& pending);
  void synchronize(const NcclPending& pending);
  bool done(const NcclPending& pending) const;
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);

 private:
  // A caller's wait. The issuing thread keeps the deadlines, unless CUDA or NCCL holds it up.
  void await(const std::function<bool()>& ready, Time deadline, Duration spin, Duration nap);
  void await_those_beside(const NcclPending& pending);

  // rank.cpp: the issuing thread
  void run(const std::stop_token& stop);
  std::shared_ptr<NcclPending> next();
  void register_memory();
  void reap();  // takes out what is over
  // Reaps; now and then also looks for what is late, gone or broken.
  void poll();
  void look_after(NcclPending& pending, Time now);
  std::vector<int> missing_in(const NcclPending::Part& part, const NcclGroup& group) const;
  void give_up();  // after a failure: aborts, so that no kernel stays behind
  [[noreturn]] void call_off(Kind kind, const std::string& what);
  // Turns the error of a NCCL call into one of the world. Success and InProgress pass.
  void check(NcclResult result, NcclComm comm, const std::string& what);
  // Waits on the issuing thread go on polling; an operation in flight has a deadline of its own.
  void wait_until(const std::function<bool()>& ready, const std::string& what,
                  Time deadline = Time::max());
  // Until NCCL has done what was asked of it.
  void settle(const NcclGroup& group, const std::string& what, Time deadline = Time::max());
  std::string fetch(const std::string& key, Time deadline = Time::max());

  // form.cpp: making groups
  NcclGroup& form(const std::string& name, std::vector<int> members, int rank);
  void quicken(NcclGroup& group, const std::string& what, Time deadline);
  void warm_up(const NcclGroup& group, const at::Tensor& scratch, Time deadline);
  NcclGroup* split(NcclGroup& group, NcclPending& pending);
  Time connect_deadline() const;

  // launch.cpp: from operations to NCCL's calls
  void launch(const std::shared_ptr<NcclPending>& pending);
  void finish_launch(NcclPending& pending);
  void call(const NcclGroup& group, const std::string& what, const std::function<void()>& calls);
  void collective(const NcclGroup& group, const Operation& operation);
  void exchange(const NcclGroup& group, const Operation& operation);
  void reduce(const NcclGroup& group, const Operation& operation);
  void fold(const NcclGroup& group, const Operation& operation);
  void messages(const std::shared_ptr<NcclPending>& pending);
  void message_to_self(const NcclPending::Part& part, const std::shared_ptr<NcclPending>& pending);

  // compare.cpp: WorldOptions::check
  void compare(const NcclPending& pending);
  void compare_message(const NcclGroup& group, const NcclPending::Part& part,
                       const Operation& theirs);

  const std::shared_ptr<NcclProcess> process_;
  const int rank_;  // in the world
  const at::Device device_;
  const std::shared_ptr<EventCount> changed_ = std::make_shared<EventCount>();
  std::shared_ptr<void> wake_token_;
  std::atomic<NcclGroup*> world_group_{nullptr};
  std::atomic<bool> aborting_{false};  // from here on an event may pass without a result
  std::deque<NcclGroup> groups_;       // the issuing thread's
  std::vector<std::shared_ptr<NcclPending>> in_flight_;  // likewise
  Time last_look_ = {};                                  // likewise
  Mutex mutex_;
  std::deque<std::shared_ptr<NcclPending>> queue_ YOKE_GUARDED_BY(mutex_);
  std::vector<std::pair<void*, size_t>> to_register_ YOKE_GUARDED_BY(mutex_);
  std::jthread thread_;
};

}  // namespace yoke::comm
