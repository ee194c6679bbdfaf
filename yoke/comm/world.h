// SPDX-License-Identifier: Apache-2.0
// What the ranks of one run share, whatever groups they form: the deadline of every wait, the
// flight recorder, and the first failure. A failure anywhere ends the whole world, because a rank
// that is gone from one group is missing in all of them. A world may span processes: each then has
// a World of its own for its ranks, and a SideChannel keeps them in step. Threads: all.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/base/error.h"
#include "yoke/base/event_count.h"
#include "yoke/base/mutex.h"
#include "yoke/comm/operation.h"
#include "yoke/comm/store.h"
#include "yoke/observe/flight_recorder.h"

namespace yoke::comm {

struct WorldOptions {
  Duration timeout = std::chrono::seconds(300);  // of every wait; a year at the most
  const char* timeout_key = "run.timeout_s";     // what people set it by
  // Whether a rank that others wait for is known to be on its way: a wait that has reached its
  // deadline then gets as long again. None: no wait does.
  std::function<bool(int rank)> on_its_way = nullptr;
  size_t flights_per_rank = 64;
  bool check = false;  // nccl, mpi: compare the ranks' calls before each operation (slow)
  // Called by the issuing rank before each operation: a seam where tests delay or break a rank.
  std::function<void(int rank, OpKind kind)> before_issue = nullptr;
};

// Where a rank lives.
struct Place {
  std::string host = {};
  int64_t process = 0;       // its id there
  std::string machine = {};  // equal for processes that can share memory
  bool operator==(const Place&) const = default;
};

// Who is in a world of several processes, and which ranks are this one's.
struct Membership {
  std::vector<Place> places;  // by rank
  int first = 0, count = 0;   // the ranks of this process
  std::shared_ptr<Store> store;
};

class World {
 public:
  World(int size, WorldOptions options);  // all ranks are threads of this process
  World(Membership members, WorldOptions options);

  int size() const { return size_; }
  bool here(int rank) const { return rank >= first_ && rank < first_ + count_; }
  int first_here() const { return first_; }
  int num_here() const { return count_; }
  const Place& place(int rank) const { return members_.places[size_t(rank)]; }
  bool one_process() const { return count_ == size_; }
  Store& store() const { return *members_.store; }
  // "rank 2"; in a world of several processes "rank 2 (host n1, process 4711)".
  std::string name_of(int rank) const;
  Duration timeout() const { return options_.timeout; }
  bool on_its_way(const std::vector<int>& missing) const {
    return options_.on_its_way && std::ranges::any_of(missing, options_.on_its_way);
  }
  const WorldOptions& options() const { return options_; }
  observe::FlightRecorder& flights() { return flights_; }
  uint32_t next_group_id() { return next_group_++; }

  // The first call wins and wakes every wait; later ones change nothing. rank -1: nobody in
  // particular.
  void fail(int rank, Kind kind, const std::string& what);
  // Gives the news of a failure elsewhere a second to come: what went wrong here may be its echo.
  bool failed_soon() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Throws the first failure, if there is one, as `rank` should hear of it.
  void check(int rank) const {
    if (failed()) raise(rank);
  }
  [[noreturn]] void raise(int rank) const;

  struct Failure {
    int rank;
    Kind kind;
    std::string what;
    std::vector<std::string> others;  // what each other rank was doing at that moment
  };
  std::optional<Failure> failure() const;
  // What another process of this world has reported. The first one wins here too.
  void fail(Failure failure);

  // A rank that has returned joins nothing any more; whoever needs it is told so at once.
  void leave(int rank);
  // "rank 2: all_reduce #17 on world, 4 MiB, waiting for 31 s", or that it has returned.
  std::string whereabouts(int rank) const;
  // "5 s (run.timeout_s) for all_reduce #3 on world; arrived: 0, 2; not arrived: rank 1: …".
  std::string lateness(const std::string& operation, const std::vector<int>& members,
                       const std::vector<int>& missing) const;
  // As far as the flight recorder knows: has the rank called the group's collective #sequence?
  bool has_called(int rank, uint32_t group, uint64_t sequence) const {
    return flights_.has_called(rank, group, sequence);
  }
  // Why `rank` need not wait any longer for an operation: a member that it misses has returned.
  // Who has left is looked up before who is missing: what is missing after that will stay so, while
  // the other way round it could still have come.
  std::optional<std::string> in_vain(int rank, const std::string& operation,
                                     const std::vector<int>& members,
                                     const std::function<std::vector<int>()>& missing) const;
  int ranks_on_host(int rank) const;  // of that rank
  bool left(int rank) const { return left_[size_t(rank)].load(std::memory_order_acquire); }

  // Called once a failure or a departure has happened, until the token is dropped.
  std::shared_ptr<void> on_change(std::function<void()> wake);

 private:
  void wake_all();

  const Membership members_;
  const int size_, first_, count_;
  const WorldOptions options_;
  SteadyClock clock_;
  observe::FlightRecorder flights_;
  std::atomic<uint32_t> next_group_{0};
  std::atomic<bool> failed_{false};
  std::vector<std::atomic<bool>> left_;
  mutable Mutex mutex_;
  std::optional<Failure> failure_ YOKE_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<std::function<void()>>> listeners_ YOKE_GUARDED_BY(mutex_);
};

}  // namespace yoke::comm
