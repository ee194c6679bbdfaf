// SPDX-License-Identifier: Apache-2.0
// What a model makes a GPU do for inputs of one shape, recorded once and then sent there as one
// piece: kernels follow each other without waiting for the host, and another process that shares
// the GPU does not come between each two of them. A build without CUDA has no_recording.cpp
// instead, which records nothing. Threads: the one that made it. Results are ready on its current
// stream.
#pragma once

#include <functional>
#include <memory>

#include "yoke/runner/values.h"

namespace yoke::runner {

class Recording {
 public:
  using Work = std::function<Values(const Values& inputs)>;
  // Does the work a few times. `inputs` are the recording's from now on; those that are tensors lie
  // on the GPU. Throws what the work throws, also where it waits for the GPU, which cannot be
  // recorded; null: nothing can be.
  static std::unique_ptr<Recording> make(const Work& work, const Values& inputs);
  ~Recording();
  // To be filled before replay().
  const at::Tensor& input(size_t place) const { return inputs_[place].toTensor(); }
  // The same tensors each time.
  const Values& replay();

 private:
  struct Impl;
  explicit Recording(const Values& inputs);
  Values inputs_, outputs_ = {};
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::runner
