// SPDX-License-Identifier: Apache-2.0
// Inference over several devices of one process, known from torch.nn.DataParallel: a batch is cut
// along its first dimension, every replica computes its piece on a thread of its own, and the
// results come back in order. Owns: one thread for each replica. Threads: any; calls are queued.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace yoke::parallel {

class Replicas {
 public:
  struct Replica {
    std::function<at::Tensor(const at::Tensor&)> forward = {};  // without gradients
    at::Device device = at::kCPU;
    double share = 1;  // of a batch, relative to the others
  };
  explicit Replicas(std::vector<Replica> replicas);
  ~Replicas();

  // [batch, ...] to [batch, ...], on the device of the input. The first replica that throws ends
  // the call with its error.
  at::Tensor forward(const at::Tensor& batch);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::parallel
