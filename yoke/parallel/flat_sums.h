// SPDX-License-Identifier: Apache-2.0
// Numbers that stand for a run of flat memory: the sum of its squares for the norm of a gradient,
// and a checksum for the comparison of replicas. Of whole runs of plan::kAlign elements.
#pragma once

#include <ATen/core/Tensor.h>

namespace yoke::parallel {

// Of a gradient, far more exact than the float32 that the norm is rounded to: so it is the same
// however the gradients are cut into shards. On a GPU that takes longer, and only `exact` does it.
at::Tensor sum_of_squares(const at::Tensor& tensor, bool exact);  // float64, one element

// Of the bits, weighted by where they are.
at::Tensor checksum(const at::Tensor& flat);  // int64, one element

}  // namespace yoke::parallel
