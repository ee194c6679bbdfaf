// SPDX-License-Identifier: Apache-2.0
// Layers cut over the ranks of an axis: each has a part of the weights and computes a part of the
// result. Between such layers every rank has all of the activations, or, with `sequence`, a run of
// the tokens: dim -2 of [..., tokens, features] (Korthikanti et al., MLSys 2023).
// Collective: all functions here, by the ranks of the axis, in the same order; in backward too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "yoke/comm/communicator.h"

namespace yoke::parallel {

struct TensorAxis {
  comm::Communicator group = {};  // empty: one rank
  bool sequence = false;
  // The ranks that have the same part, and other samples: for norms over the whole batch.
  comm::Communicator replicas = {};

  int rank() const { return group ? group.rank() : 0; }
  int size() const { return group ? group.size() : 1; }
  bool scatters() const { return sequence && size() > 1; }
  // The size of one of size() equal parts; throws Kind::Usage where it does not divide.
  int64_t part_of(int64_t whole, const char* what) const;
};

// What is under way, and what has to be done with it when it is there.
struct Gathering {
  at::Tensor all = {};  // [ranks, ...]
  comm::Work work = {};
  at::Tensor wait();  // [..., tokens, features]
};
Gathering gather_tokens(const at::Tensor& mine, const TensorAxis& axis);
// The sum over the ranks; with `sequence` of this rank's tokens alone.
struct Reduction {
  at::Tensor result = {};
  comm::Work work = {};
  at::Tensor wait() {
    work.wait();
    return result;
  }
};
Reduction reduce_partial(at::Tensor partial, const TensorAxis& axis);

// With autograd. From activations that all ranks have to those of one rank's tokens, and back.
at::Tensor scatter_tokens(const at::Tensor& all, const TensorAxis& axis);
at::Tensor collect_tokens(const at::Tensor& mine, const TensorAxis& axis);

// Throws Kind::Usage where an index of a word is not in [0, words) or `ignored`; on a GPU it is
// found when that comes to it.
void check_words(const at::Tensor& indices, int64_t words, std::optional<int64_t> ignored);

}  // namespace yoke::parallel
