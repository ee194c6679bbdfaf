// SPDX-License-Identifier: Apache-2.0
// Layers with the interface of their torch counterparts, to be put in their place. They can be cut
// over the ranks of an axis (Shoeybi et al., 2019): a linear layer by its outputs, whose results
// stay with the ranks, followed by one that is cut by its inputs and adds them up. And they can put
// off the gradients of their weights (deferral.h), which pipelines with split backward want.
// Otherwise they are their counterparts.
//   up->split_outputs(axis); down->split_inputs(axis);
// Collective: splitting and forward, by the ranks of the axis. Weights begin with its first rank's.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <string>
#include <vector>

#include "yoke/parallel/tensor_axis.h"

namespace yoke::parallel {

// How a parameter was cut: every rank has its part of each of the parts of a dim.
struct ParameterSplit {
  std::string name = {};
  int64_t dim = 0;
  std::vector<int64_t> parts = {};
};

// A layer that may have parts of parameters.
class Splittable {
 public:
  virtual ~Splittable() = default;
  virtual std::vector<ParameterSplit> splits() const = 0;  // empty: it has all
};

// Of all layers in a module, with the names that the parameters have there.
std::vector<ParameterSplit> splits_of(const torch::nn::Module& module);
// Names of the parameters that every rank of the axis has.
std::vector<std::string> whole_parameters(const torch::nn::Module& module);
// Collective. The whole of a parameter, on every rank.
at::Tensor join_parts(const at::Tensor& mine, const ParameterSplit& split, const TensorAxis& axis);

class LinearImpl : public torch::nn::LinearImpl, public Splittable {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);

  // Keeps this rank's part of the outputs: of each of `parts`, which add up to them (queries, keys
  // and values; gate and up); empty: of all. Takes its input whole, or with `sequence` its tokens.
  void split_outputs(const TensorAxis& axis, std::vector<int64_t> parts = {});
  // Keeps the part of the weights for this rank's part of the inputs. Gives results of all ranks,
  // or with `sequence` those of its tokens.
  void split_inputs(const TensorAxis& axis);
  std::vector<ParameterSplit> splits() const override;

  enum class Split { None, Outputs, Inputs };
  Split how() const { return split_; }

 private:
  void keep(int64_t dim, std::vector<int64_t> parts);
  Split split_ = Split::None;
  std::vector<int64_t> parts_;
  TensorAxis axis_;
};
TORCH_MODULE(Linear);

// Weight gradients are put off, and it can be split, only without max_norm and sparse gradients.
class EmbeddingImpl : public torch::nn::EmbeddingImpl, public Splittable {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& indices);

  // Keeps this rank's part of the words.
  void split_words(const TensorAxis& axis);
  std::vector<ParameterSplit> splits() const override;

 private:
  TensorAxis axis_;
};
TORCH_MODULE(Embedding);

class LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  at::Tensor forward(const at::Tensor& input);
  // input + branch, which may be undefined, and its norm: what goes on beside a block and what goes
  // into it. On a GPU forward and backward are one pass over memory each.
  struct Sum {
    at::Tensor whole = {}, normed = {};
  };
  Sum sum(const at::Tensor& input, const at::Tensor& branch = {});

 private:
  std::vector<at::Tensor> fused(const at::Tensor& input, const at::Tensor& branch);
};
TORCH_MODULE(LayerNorm);

// Divided by the root of the mean square of the last dim, times a weight (Zhang and Sennrich,
// 2019).
class RmsNormImpl : public torch::nn::Module {
 public:
  explicit RmsNormImpl(int64_t dim, double eps = 1e-5);
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight;

 private:
  const double eps_;
};
TORCH_MODULE(RmsNorm);

}  // namespace yoke::parallel
