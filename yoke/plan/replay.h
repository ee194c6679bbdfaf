// SPDX-License-Identifier: Apache-2.0
// What a program (program.h) costs, without running it: so many rounds of its moments in time, each
// operation when its queue is free and all that it waits for is there. A value that moves is there
// after the latency and the time of its bytes, those of one channel one after the other; any other
// at once. A meeting ends for its members together. A loop takes what its
// body's rounds take, a branch its costlier arm, each from entry to the member's own last
// operation. The program is well formed: its places are all there.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "yoke/plan/program.h"

namespace yoke::plan {

struct ReplayCosts {
  double operation = 10e-6;  // seconds of an operation without a cost of its own
  double bytes_per_s = 8e9;  // of a channel's values between two queues, and of messages
  double latency = 5e-6;
  int64_t loop_rounds = 3;  // of a body that a predicate ends
};

struct Replayed {
  struct Timed {
    size_t index = 0;  // in the row of its queue
    int64_t round = 0;
    double begin = 0, end = 0;    // of its work; waiting lies before
    std::vector<int> parts = {};  // that it is in, for part_of()
    int64_t turn = 0;             // of the innermost
  };
  // By queue. After a loop or branch comes what is inside: the costlier arm; of many turns the
  // first two and the last.
  std::vector<std::vector<Timed>> rows = {};
  double makespan = 0, period = 0;  // of all rounds; of one when they have settled
  std::vector<double> busy = {};    // by queue, part of the makespan
  // By queue: values in channels that it takes from, and taken ones until the operation's end.
  std::vector<double> peak_bytes = {};
  struct Link {
    int queue = 0;
    Timed timed = {};
    int channel = -1;  // what it waited for last: a value or room of it; -1: its queue or nothing
  };
  // The path that makes it as long as it is, first to last. An operation that waits in a meeting
  // follows what its latest member waited for, one that waits for room what kept the taker busy.
  // After a loop or branch comes the path inside, to what its queue does there last.
  std::vector<Link> critical = {};
  int costliest_channel = -1;             // that the queues wait for longest; -1: for none
  std::vector<int> costliest_parts = {};  // that it is in
  double costliest_wait = 0;              // seconds, of all rounds
};

// Nothing if it gets stuck; then `stuck` says where, a line for each queue that waits.
std::optional<Replayed> replay(const Program& program, int64_t rounds,
                               const ReplayCosts& costs = {}, std::string* stuck = nullptr);

// "refine: nearer": with the parts that it is in.
std::string name_of(const Program& program, int queue, const Replayed::Timed& timed);

// Pictures as those of draw.h: names of operations, cut where there is no room; dots are idle time.
std::string draw_text(const Program& program, const Replayed& replayed, int columns = 120);
std::string draw_svg(const Program& program, const Replayed& replayed);
void write_trace(const Program& program, const Replayed& replayed, std::ostream& out);

}  // namespace yoke::plan
