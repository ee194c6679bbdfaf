// SPDX-License-Identifier: Apache-2.0
// The process's environment, as a value: no room below this one reads it.
#pragma once

#include "yoke/topo/host.h"
#include "yoke/topo/launch.h"

namespace yoke::cli {

topo::Environment read_environment();
// Thousands of connections at once are more than the usual bound on files: to what is allowed.
void raise_file_limit();
// This host, with the GPUs that CUDA_VISIBLE_DEVICES lets this process see, numbered as CUDA does.
topo::Host read_visible_host(const topo::Environment& environment);

// Of a device of this host (topo::peak_flops); 0 of a CPU.
double peak_flops(const topo::Host& host, const topo::Device& device, bool in_16_bits);

}  // namespace yoke::cli
