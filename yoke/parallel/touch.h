// SPDX-License-Identifier: Apache-2.0
// Memory that tells before it is used. C++ modules have no forward hooks, but every operation of
// LibTorch can be observed with its arguments: so parameters can be awaited, or fetched, when the
// first operation wants them, in any module, unchanged. What such a storage holds can be taken away
// and given back at another address while tensors, views and saved graphs refer to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>

namespace yoke::parallel {

struct Touch {
  uint64_t operation = 0;  // the same for all arguments of an operation, and for no other
  bool outermost = true;   // no other operation is under way on this thread
};

class Touchable {
 public:
  virtual ~Touchable() = default;
  // Before an operation with a tensor of this memory among its arguments. Must not throw: LibTorch
  // would swallow it and go on.
  virtual void touched(Touch touch) noexcept = 0;
};

// A tensor of `count` elements over memory that somebody else keeps; null: none yet.
at::Tensor make_touchable(Touchable* owner, int64_t count, const at::TensorOptions& options,
                          void* memory);
// Gives the storage of such a tensor other memory; all its views follow.
void move_memory(const at::Tensor& tensor, void* memory);
// Makes such a storage an ordinary one that keeps `memory` alive.
void settle_memory(const at::Tensor& tensor, const at::Tensor& memory);
// Whose memory the tensor lies in; null: not of this kind.
Touchable* owner_of(const at::Tensor& tensor);

// While it lives, owners hear of the operations of the calling thread, and of the backward passes
// that it starts.
class TouchObserver {
 public:
  TouchObserver();
  ~TouchObserver();  // on the same thread
  TouchObserver(const TouchObserver&) = delete;
  TouchObserver& operator=(const TouchObserver&) = delete;

 private:
  uint64_t handle_;
};

}  // namespace yoke::parallel

// Until the end of the block: an operation on these tensors that is not one of LibTorch's.
#define YOKE_TOUCH(name, ...) RECORD_FUNCTION(name, std::vector<c10::IValue>({__VA_ARGS__}))
