// SPDX-License-Identifier: Apache-2.0
// Weight gradients that are put off. A pipeline wants the gradient of a stage's input first, which
// the stage before is waiting for, and that of the weights when there is time. A layer that can
// part them asks for the deferral of its thread in forward, keeps it for its backward, and there
// adds what is left to do instead of doing it, with an undefined gradient for autograd.
// Threads: made and installed on the rank's; filled by its backward; run by the rank's.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace yoke::parallel {

// Takes a part of a leaf's gradient. `last`: no more of it comes for now.
using Deliver = std::function<void(const at::Tensor& leaf, const at::Tensor& value, bool last)>;

class Deferral {
 public:
  // One parameter's gradient.
  void add(at::Tensor leaf, std::function<at::Tensor()> gradient) {
    todo_.emplace_back(std::move(leaf), std::move(gradient));
  }
  // Computes what was put off and forgets it.
  void run(const Deliver& deliver);

  // Of what the calling thread computes; null: nothing is put off.
  static std::shared_ptr<Deferral> current();
  class Scope {
   public:
    explicit Scope(std::shared_ptr<Deferral> deferral);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<Deferral> outer_;
  };

 private:
  std::vector<std::pair<at::Tensor, std::function<at::Tensor()>>> todo_;
};

}  // namespace yoke::parallel
