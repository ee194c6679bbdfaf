// SPDX-License-Identifier: Apache-2.0
// What several queues do, round after round, when models work together: for each queue (a device,
// or one of several places on it) its operations in their order, as a schedule has the actions of
// its ranks. Values travel through channels, bounded queues between two operations' rows; what is
// between queues is either such a channel (one-sided: only its bounds make anybody wait) or a
// meeting: a send with its receive, a collective, the entry of a loop or branch.
//
// One round of a queue does each operation of its row once, in three moments:
//   take   all that it takes is there (each channel holds the count), then all is taken at once
//   meet   Send and Recv wait for each other; Collective, Loop and Branch for their whole group
//   give   there is room for all that it gives, then all is given at once
// then comes the next operation, and after the last the first again. The k-th Send of a queue to
// another meets the k-th Recv there from it, and the k-th meeting of a group on one member the k-th
// on the others, whatever they are called: that they mean the same is a thing to be proved.
// prove.h proves that no round gets stuck, replay.h tells what it costs, flow/ runs it.
// Values: no torch, and equal ones for equal flows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "yoke/plan/port.h"

namespace yoke::plan {

struct Channel {
  std::string name = {};  // "a.y -> b.x"
  int64_t capacity = 1;   // values that it can hold
  int64_t initial = 0;  // that it holds before the first round: so many rounds (or counts) of delay
  // False: nobody waits. What comes in replaces the oldest or is dropped, what is taken is there
  // already (`latest` and `drop`, values held for the body of a loop, values that leave it).
  bool waits = true;
  // What either end says of its values; sizes that have a name are equal all over the program if
  // their names are. An end that says nothing has an empty name.
  Port given = {}, taken = {};
  double bytes = 0;  // of a value, where it is known
  // Whether they are copied on their way; none said: where its ends are two queues.
  std::optional<bool> moves = {};
};

struct Access {
  int channel = 0;
  int64_t count = 1;
  bool operator==(const Access&) const = default;
};

// Memory that several operations touch: a model's weights, a value that two consumers share.
struct Use {
  int buffer = 0;
  bool writes = false;
  bool operator==(const Use&) const = default;
};

struct Operation {
  enum class Kind { Compute, Copy, Send, Recv, Collective, Loop, Branch };
  std::string name = {};  // "student.1": what it runs, and which time in a round
  Kind kind = Kind::Compute;
  std::vector<Access> takes = {}, gives = {};
  int peer = -1;          // Send, Recv: the other queue
  int group = -1;         // Collective, Loop, Branch: place in Program::groups
  std::string what = {};  // Send, Recv, Collective, Loop, Branch: must be equal at all ends
  std::vector<Use> uses = {};
  std::vector<int> parts = {};  // Loop: its body, Branch: its arms; places in Program::parts
  int64_t turns = 0;            // Loop: 0 where a predicate ends it
  double cost = 0;              // seconds, where it is known
  bool meets() const { return kind >= Kind::Send; }
};

struct Group {
  std::string name = {};
  std::vector<int> queues = {};
};

struct Program {
  std::string name = {};
  std::vector<std::string> queues = {};  // "cpu:0"
  std::vector<Channel> channels = {};
  std::vector<Group> groups = {};
  std::vector<std::string> buffers = {};
  std::vector<std::vector<Operation>> rows = {};  // by queue
  // Bodies and arms: of the same queues, with channels of their own. Whatever the predicate says,
  // every member of the group hears it at the meeting and does the same part.
  std::vector<Program> parts = {};

  size_t num_operations() const;  // those of parts too
};

// Itself, its parts, then theirs: a part is called by its place after the program itself, so the
// first are called as in Program::parts.
std::vector<const Program*> with_parts(const Program& program);
// The part of a part …, each by its place in Program::parts; none: itself.
const Program& part_of(const Program& program, const std::vector<int>& parts);

// A line for each queue: "cpu:0: a, a.y->b.x SEND 1, …", those of parts indented below.
std::string to_text(const Program& program);

}  // namespace yoke::plan
