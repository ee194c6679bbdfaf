// SPDX-License-Identifier: Apache-2.0
// What a schedule costs, without running it: every rank does its actions in order, each when what
// it needs is there. Messages travel beside computation.
#pragma once

#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "yoke/plan/schedule.h"

namespace yoke::plan {

// For the whole share of layers of one rank: each of its v stages takes one v-th of them. Any unit.
struct Times {
  double f = 1, i = 1, w = 1;
  double comm = 0;  // from one rank to another
};

struct Costs {
  Times times = {};
  std::vector<double> stage_weight = {};   // how long a stage takes, relative to 1; empty: all 1
  std::vector<double> rank_slowness = {};  // likewise of a rank
  // Of a micro-batch's activations, relative to what a stage holds after F: what is left after I.
  double kept_after_i = 1;

  double duration(const Schedule& schedule, const Action& action, int rank) const;
  // Throws Kind::Usage where the numbers do not fit so many ranks and stages, or are not above 0.
  void check(int ranks, int stages) const;
};

struct Limits {
  Costs costs = {};
  double memory = std::numeric_limits<double>::infinity();  // the largest peak of a rank
};

struct Timed {
  Action action;
  double begin = 0, end = 0;
};

struct Simulation {
  std::vector<std::vector<Timed>> rows = {};  // by rank; what takes no time too
  double makespan = 0;
  // The part of the time in which the busiest rank does not compute: of the makespan, and of the
  // longest time from a rank's first action to its last, which counts where steps may overlap.
  double bubble = 0, bubble_span = 0;
  // By rank, in micro-batches of its whole share, held from F to W; where they are computed again,
  // from then on.
  std::vector<double> peak = {};
  std::vector<double> busy = {};  // by rank, part of the makespan
};

// Nothing if the ranks wait for each other in a circle; then `stuck` gets a rank and the index of
// the action that it waits for. The schedule's actions are well formed, and of its stages.
std::optional<Simulation> simulate(const Schedule& schedule, const Costs& costs = {},
                                   std::pair<int, size_t>* stuck = nullptr);

}  // namespace yoke::plan
