// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batch of all ranks, as on one device. Without a communicator it is
// the ordinary one, over the rank's own samples. Collective: construction, forward in training,
// and its backward; ranks may have unequal numbers of samples, not none.
#pragma once

#include <torch/nn/module.h>

#include "yoke/comm/communicator.h"

namespace yoke::parallel {

struct BatchNormOptions {
  int64_t features = 0;
  double eps = 1e-5, momentum = 0.1;
};

class BatchNorm : public torch::nn::Module {
 public:
  explicit BatchNorm(const BatchNormOptions& options, const comm::Communicator& comm = {});
  at::Tensor forward(const at::Tensor& x);  // [batch, features, ...]

  at::Tensor weight, bias;               // [features]
  at::Tensor running_mean, running_var;  // [features]

 private:
  const BatchNormOptions options_;
  const comm::Communicator comm_;  // of its own: gradients travel on another at the same time
};

}  // namespace yoke::parallel
