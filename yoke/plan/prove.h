// SPDX-License-Identifier: Apache-2.0
// Whether a program (program.h) can run for ever: proved, or refuted with a circle of operations
// that wait for each other. A marked graph underneath (Commoner et al., 1971): the moments of one
// round are its vertices; the order of a queue, values and room in channels its edges, those that
// reach back into an earlier round carry a token; meetings are contracted into one vertex. It is
// live exactly if no circle is free of tokens. Linear in the size of the program.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "yoke/plan/program.h"

namespace yoke::plan {

enum class Rule {
  Balance,      // what is given to a channel in a round is what is taken, and it fits
  Data,         // who takes a value waits for who gives it
  Capacity,     // who gives a value waits for room
  Messages,     // a send waits for its receive and it for the send
  Collectives,  // members of a group wait for each other
  Order,        // pairs and groups mean the same meeting, and as many
  Races,        // two that touch the same memory, one to write, are ordered
  Shapes,       // both ends of a channel agree on datatype and sizes
};
inline constexpr int kNumRules = 8;
const char* rule_name(Rule rule);

// One change that makes the program pass; found by trying, so it is known to.
struct Suggestion {
  enum class Kind { None, Tokens, Capacity, Swap, Move, Count } kind = Kind::None;
  int part = -1;            // as with_parts() calls them; -1: the program itself
  int channel = -1;         // Tokens, Capacity, Count
  int queue = -1;           // Swap, Move, Count
  size_t from = 0, to = 0;  // places in the row; Count: from
  int64_t value = 0;        // new initial (the capacity grows with it), capacity or count
  bool gives = false;       // Count: of what is given
  std::string text = {};    // "give 'a.y -> b.x' a capacity of 2"; None: what else can be done
};
Program apply(Program program, const Suggestion& suggestion);

struct Knot {
  Rule rule = Rule::Data;
  std::string what = {};  // one or two sentences with names
  int part = -1;          // as with_parts() calls them
  // Of a deadlock: each waits for the next, the last for the first.
  struct Step {
    int queue = 0;
    size_t index = 0;        // in its row
    std::string why = {};    // "waits for a value of 'a.y -> b.x' from"
    Rule rule = Rule::Data;  // Data also for the order of a queue
    int channel = -1;        // of a value or of room
  };
  std::vector<Step> circle = {};
  // Of all else: the operations and the channel that it is about, where there are any.
  struct Place {
    int queue = 0;
    size_t index = 0;
  };
  std::vector<Place> places = {};
  int channel = -1;
  Suggestion suggestion = {};
  std::string text(const Program& program) const;  // all of it, for people
};

struct ProveOptions {
  std::vector<Rule> without = {};  // for tests of the prover itself
  bool suggest = true;
};

// Nothing: it is live, with one order of everything that touches the same memory. Each part is
// proved as a program of its own; names of sizes hold for all. A place that does not exist (of a
// channel, queue, group, buffer or part) is a bug of who made the program: Kind::Internal.
std::optional<Knot> find_knot(const Program& program, const ProveOptions& options = {});
// The first of a bounded number of changes that passes, those first that change the least meaning.
Suggestion find_suggestion(const Program& program, const Knot& knot,
                           const ProveOptions& options = {});
// True where a channel that does not wait is both given and taken: live, but what is taken hangs
// on timing. (Values held for a body, or that leave it, have but one end in their program.)
bool hangs_on_timing(const Program& program);

}  // namespace yoke::plan
