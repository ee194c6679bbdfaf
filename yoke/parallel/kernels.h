// SPDX-License-Identifier: Apache-2.0
// Kernels of our own for a GPU, where LibTorch takes several passes over memory for what can be
// done in one. Each is on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

namespace yoke::parallel {

// Compiles them for the GPU; those of norms for rows of `dim`. A model that uses them asks when it
// is made: later this could wait for ranks that wait for this one. Elsewhere nothing is done.
void load_kernels(at::Device device, int64_t dim);
// Whether they can be had for such a tensor: contiguous, on a GPU, of a floating type up to
// float32.
bool has_kernels(const at::Tensor& tensor);
// Contiguous, and can be read in vectors.
bool is_aligned(const at::Tensor& tensor);

bool has_norm_kernels(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// float32 [tokens], of `logits` [tokens, words]. `to_gradient`: what is then in the logits is the
// gradient of their sum.
at::Tensor fused_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                               bool to_gradient);
// values *= factor, one float32; costs nothing where it is 1, which the host need not know.
void multiply_unless_one(const at::Tensor& values, const at::Tensor& factor);

// x + branch, rounded, and its layer norm over the last dim. `branch` may be undefined: the sum is
// x.
struct Normed {
  at::Tensor sum = {}, result = {};
  at::Tensor mean = {}, rstd = {};  // float32 [rows]
};
Normed fused_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& gamma,
                  const at::Tensor& beta, double eps);
// `x` is the sum. Adds `d_sum` to the gradient of the input where it is defined.
struct NormGradients {
  at::Tensor input = {}, weight = {}, bias = {};
};
NormGradients fused_norm_backward(const at::Tensor& d_result, const at::Tensor& d_sum,
                                  const at::Tensor& x, const at::Tensor& gamma,
                                  const at::Tensor& mean, const at::Tensor& rstd);

}  // namespace yoke::parallel
