// SPDX-License-Identifier: Apache-2.0
// Pictures of a simulated schedule: ranks downwards, time to the right.
#pragma once

#include <iosfwd>

#include "yoke/plan/simulate.h"

namespace yoke::plan {

// For a terminal so many columns wide: "F0" forward of micro-batch 0, "I0" and "W0" the halves of
// its backward, "B0" both; small letters are the rank's later stages, dots are idle time.
std::string draw_text(const Schedule& schedule, const Simulation& simulation, int columns = 120);
// One self-contained picture, with times and idle parts.
std::string draw_svg(const Schedule& schedule, const Simulation& simulation);
// JSON that Perfetto and chrome://tracing open; a unit of time is a millisecond.
void write_trace(const Simulation& simulation, std::ostream& out);

}  // namespace yoke::plan
