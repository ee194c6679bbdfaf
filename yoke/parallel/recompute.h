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

// The same for a model of many equal parts. Selective: every second part, for half of the memory
// saved at half of the time.
enum class Checkpointing { None, Selective, Full };
at::Tensor checkpoint(Checkpointing checkpointing, int64_t part,
                      const std::function<at::Tensor(const at::Tensor&)>& fn,
                      const at::Tensor& input);

// Zeroes each element with the given probability and scales the rest. Element i of x is element
// `first` + i of the random numbers: ranks that hold parts of a batch drop what one rank would.
// (torch's own Dropout draws from a generator that all ranks of a process share, in the order in
// which they come.)
at::Tensor dropout(const at::Tensor& x, double probability, const Rng& rng, int64_t first = 0);
// The same for a part of a larger tensor along one dim, as the ranks of a layer have them: together
// they drop what one rank would, and where all have everything, they drop the same.
struct Window {
  int64_t dim = 0;    // from the end where below 0
  int64_t begin = 0;  // of x in it
  int64_t whole = 0;  // size of the dim
};
at::Tensor dropout(const at::Tensor& x, double probability, const Rng& rng, Window window,
                   int64_t first = 0);

}  // namespace yoke::parallel
