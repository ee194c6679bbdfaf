// SPDX-License-Identifier: Apache-2.0
// Layers with the interface of their torch counterparts, to be put in their place: they can put off
// the gradients of their weights (deferral.h), which pipeline schedules with split backward want.
// Where nothing is put off, they are their counterparts.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace yoke::parallel {

class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(Linear);

// Put off only without max_norm and sparse gradients.
class EmbeddingImpl : public torch::nn::EmbeddingImpl {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& indices);
};
TORCH_MODULE(Embedding);

class LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(LayerNorm);

}  // namespace yoke::parallel
