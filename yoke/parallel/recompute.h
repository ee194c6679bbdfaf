// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: what `fn` keeps for backward is dropped, and computed again when
// backward comes (Chen et al., 2016). The same values bit by bit, if `fn` draws its random numbers
// from base::Rng. A parameter may be used in one such part, or outside of them, not in both.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "yoke/base/rng.h"

namespace yoke::parallel {

at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& fn,
                     const at::Tensor& input);

// Zeroes each element with the given probability and scales the rest. Element i of x is element
// `first` + i of the random numbers: ranks that hold parts of a batch drop what one rank would.
at::Tensor dropout(const at::Tensor& x, double probability, const Rng& rng, int64_t first = 0);

}  // namespace yoke::parallel
