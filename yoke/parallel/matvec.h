// SPDX-License-Identifier: Apache-2.0
// A linear layer for one token on a CPU, as generating text has it: all is reading the weights, and
// a BLAS may do that on one thread. Cut into as many products as there are threads, it is done on
// all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace yoke::parallel {

// Whether it is of use: one row, without gradients, and weights that take a while and lie row by
// row.
bool is_matvec(const at::Tensor& input, const at::Tensor& weight);
// [..., outputs] of [..., inputs] that is_matvec().
at::Tensor matvec(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias);

}  // namespace yoke::parallel
