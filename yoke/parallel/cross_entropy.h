// SPDX-License-Identifier: Apache-2.0
// The loss of models of words; on a GPU of one rank without a copy of the logits.
#pragma once

#include "yoke/parallel/tensor_axis.h"

namespace yoke::parallel {

// The sum of the cross entropies of `logits` [tokens, words / ranks], each rank's part of the
// words, and `targets` [tokens] of all. Nobody ever has all logits. A target that is `ignored`
// counts 0. On a GPU of one rank, where a gradient is wanted, it is written over the logits: nobody
// else may look at them.
// Collective, by the ranks of the axis.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const TensorAxis& axis = {}, int64_t ignored = -100);

}  // namespace yoke::parallel
