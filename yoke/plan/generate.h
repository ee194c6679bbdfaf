// SPDX-License-Identifier: Apache-2.0
// The schedules that people know, for p ranks and m micro-batches: computation only.
#pragma once

#include "yoke/plan/simulate.h"

namespace yoke::plan {

struct ScheduleShape {
  int ranks = 1;
  int micro_batches = 1;
  int chunks = 2;  // stages of a rank, where the schedule lets one choose: interleaved, looped-bfs
  Limits limits = {};  // zb-auto: what it is made for
};

// layer, gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zbv, dualpipev, zb-auto. Throws
// Kind::Usage for another name, with the nearest, and where the schedule's rule does not allow the
// numbers, with the rule.
Schedule make_schedule(const std::string& name, const ScheduleShape& shape);
const std::vector<std::string>& schedule_names();

}  // namespace yoke::plan
