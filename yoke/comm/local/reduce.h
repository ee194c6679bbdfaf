// SPDX-License-Identifier: Apache-2.0
// Element-wise folds of CPU memory in source order: element i of every target becomes source 0 (op)
// source 1 (op) … Half types are folded in float and rounded once; min and max pass NaN on. A
// target may be one of the sources, exactly.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "yoke/comm/operation.h"

namespace yoke::comm {

using ReduceKernel = void (*)(std::span<const void* const> sources, std::span<void* const> targets,
                              int64_t begin, int64_t end);

// Never null for what Communicator lets through.
ReduceKernel reduce_kernel(at::ScalarType type, ReduceOp op);

}  // namespace yoke::comm
