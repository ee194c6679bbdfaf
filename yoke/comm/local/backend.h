// SPDX-License-Identifier: Apache-2.0
// The local backend: ranks are threads of one process and hand each other pointers. CPU tensors,
// and CUDA tensors where the build has CUDA.
#pragma once

#include <memory>
#include <vector>

#include "yoke/comm/communicator.h"
#include "yoke/comm/world.h"

namespace yoke::comm {

// One communicator for each rank of `world`, in rank order; hand each to its thread.
std::vector<Communicator> make_local(const std::shared_ptr<World>& world);

}  // namespace yoke::comm
