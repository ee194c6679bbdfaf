// SPDX-License-Identifier: Apache-2.0
// What is there before the first round.
#pragma once

#include <map>

#include "yoke/flow/compile.h"

namespace yoke::flow {

// Of an edge with staleness, or at which nobody waits. Throws Kind::Config where its shape is open,
// or another than that of the ports.
at::Tensor initial_value(const Compiled& compiled, const Edge& edge);
// That all of these have one and that there is memory for them, beside the weights; and that models
// which trade weights or gradients have equal ones. `free`: of each device, as free_memory() says.
void check_first_values(const Compiled& compiled, const std::map<topo::Device, uint64_t>& free);

}  // namespace yoke::flow
