// SPDX-License-Identifier: Apache-2.0
// Whether a schedule is right: proved before a rank runs it. In this order: every stage is on one
// rank; every micro-batch of every stage has one forward and one backward, whole or in two halves,
// in their order; gradients are reduced after the last backward; what computes has its parameters;
// the computations do not wait in a circle; memory suffices; each pair of ranks sends and receives
// in one order; and even if every message waits for its other end, all come to their end. A
// schedule without messages is checked with those that add_messages() puts in.
#pragma once

#include <optional>

#include "yoke/plan/simulate.h"

namespace yoke::plan {

struct Flaw {
  int rank = 0;
  size_t index = 0;  // of the action in the rank's row; its length: it is of the row, not of one
  std::string what = {};
  bool deadlock = false;  // ranks wait for each other
};

std::optional<Flaw> find_flaw(const Schedule& schedule, const Limits& limits = {});
// The ranks' rows around the flaw, with an arrow at it.
std::string picture_of(const Schedule& schedule, const Flaw& flaw);
// Throws Kind::Usage with the picture.
void check(const Schedule& schedule, const Limits& limits = {});

}  // namespace yoke::plan
