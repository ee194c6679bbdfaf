// SPDX-License-Identifier: Apache-2.0
// From what is computed to what is done: passes add to a schedule what lies between computations.
#pragma once

#include "yoke/plan/schedule.h"

namespace yoke::plan {

// A send after each computation whose result another rank needs, and at once the receive on that
// rank: so every pair of them has one place in one order of all, and nothing can wait in a circle,
// even if every message were to wait for its other end. Throws Kind::Usage if the computations do.
Schedule add_messages(const Schedule& schedule);
// The reduction of a stage's gradients after the last computation that adds to them, and the
// optimizer's step at the end of each row.
Schedule add_reductions(const Schedule& schedule);
// Parameters of a stage gathered before it computes, of the next `ahead` stages already, and those
// of the others dropped.
Schedule add_unshards(const Schedule& schedule, int ahead = 1);
// I and W of one stage and micro-batch that follow each other become B.
Schedule merge_backward(const Schedule& schedule);

}  // namespace yoke::plan
