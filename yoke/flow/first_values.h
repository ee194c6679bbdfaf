// SPDX-License-Identifier: Apache-2.0
// What is there before the first round.
#pragma once

#include "yoke/flow/compile.h"

namespace yoke::flow {

// Of an edge with staleness, or at which nobody waits. Throws Kind::Config where its shape is open.
at::Tensor initial_value(const Compiled& compiled, const Edge& edge);
// That all of these have one, and that models which trade weights or gradients have equal ones.
void check_first_values(const Compiled& compiled);

}  // namespace yoke::flow
