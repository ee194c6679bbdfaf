// SPDX-License-Identifier: Apache-2.0
// The last operations of every rank of this process, for the day when something does not arrive:
// who waits in what, since when, and what each rank did before. Memory is taken once, at the start.
// Owns: everything but the clock. Threads: any; ranks do not disturb each other.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/base/mutex.h"

namespace yoke::observe {

struct Flight {
  const char* kind = "";  // a static string such as "all_reduce"
  uint32_t group = 0;
  uint64_t sequence = 0;
  uint64_t bytes = 0;
  int peer = -1;         // root or peer rank; -1: none
  bool message = false;  // numbered by its pair, not by its group
};

class FlightRecorder {
 public:
  struct Record {
    Flight flight;
    Time posted;
    std::optional<Time> finished;
  };

  FlightRecorder(int num_ranks, size_t capacity_per_rank, const Clock& clock);

  // Gives the ticket that finish() wants.
  uint64_t post(int rank, const Flight& flight);
  // Does nothing when newer operations have already overwritten the entry.
  void finish(int rank, uint64_t ticket);
  // A group without a name is shown by its number.
  void name_group(uint32_t group, std::string name);

  std::optional<Record> last(int rank) const;
  std::vector<Record> records(int rank) const;  // oldest first

  // The highest number of a collective that the rank has posted in a group, of all its groups.
  using Called = std::map<std::string, uint64_t>;  // by the group's name
  Called called(int rank) const;
  bool has_called(int rank, uint32_t group, uint64_t sequence) const;
  // What another process tells of a rank of its own; groups are the same if they have one name.
  void note(int rank, Record record, const std::string& group, Called called);
  std::string group_name(uint32_t group) const;

  // A few words for error messages, about the oldest operation in flight, else the last one:
  //   all_reduce #17 on world, 4 MiB, waiting for 31 s
  //   finished barrier #16 on world 2 s ago
  //   no operation yet
  std::string describe(int rank) const;
  // A table of all records of all ranks. Must not be called from a signal handler.
  void dump(std::ostream& out) const;

 private:
  struct alignas(64) Lane {  // a cache line of its own for each rank
    Mutex mutex;
    uint64_t num_posted YOKE_GUARDED_BY(mutex) = 0;
    std::vector<Record> ring YOKE_GUARDED_BY(mutex);  // ticket t lies at t modulo capacity
    std::map<uint32_t, uint64_t> called YOKE_GUARDED_BY(mutex);  // by group
    Called noted YOKE_GUARDED_BY(mutex);
  };

  Lane& lane(int rank) const;

  const Clock& clock_;
  const int num_ranks_;
  const std::unique_ptr<Lane[]> lanes_;
  mutable Mutex names_mutex_;
  std::map<uint32_t, std::string> names_ YOKE_GUARDED_BY(names_mutex_);
};

}  // namespace yoke::observe
