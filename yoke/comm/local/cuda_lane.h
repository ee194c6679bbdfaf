// SPDX-License-Identifier: Apache-2.0
// The CUDA half of the local backend. A lane carries one ordered sequence of operations, numbered
// 1, 2, 3 …; the host thread that finds an operation complete enqueues all of it, on streams of the
// lane's own. Ranks that came earlier have let their streams wait for a counter in pinned memory,
// which the lane's stream raises when the operation is over: no host thread ever waits for a peer.
// Threads: launch() by one thread at a time and in order; the rest from any thread.
// A build without CUDA has no_cuda_lane.cpp instead, where cuda_available() is false.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "yoke/comm/local/jobs.h"
#include "yoke/comm/operation.h"

namespace yoke::comm {

bool cuda_available();
// Makes `device` the calling thread's device; and, entered, with a stream of its own as the current
// stream, until the thread ends.
void cuda_use(int device);
void cuda_enter(int device);

class CudaEvent;  // a point on a stream

// All that the caller's current stream on `device` has been given so far.
std::shared_ptr<CudaEvent> cuda_mark(at::Device device);
// The same; null where the stream has already done it all.
std::shared_ptr<CudaEvent> cuda_mark_busy(at::Device device);
// The caller's current stream on `device` goes on only after the event.
void cuda_wait(const CudaEvent& event, at::Device device);
bool cuda_passed(const CudaEvent& event);
// The reduction of tensors of one size, in their order, on the current stream.
at::Tensor cuda_fold(const std::vector<at::Tensor>& sources, ReduceOp op);

class CudaLane {
 public:
  CudaLane();
  ~CudaLane();  // releases, and waits for what was launched

  // Enqueues operation `number`: after marks[i], the copies before, the jobs, the copies after.
  // The parts must stay alive until the event that it returns has passed.
  std::shared_ptr<CudaEvent> launch(uint32_t number, const std::vector<Operation>& parts,
                                    const std::vector<std::shared_ptr<CudaEvent>>& marks,
                                    const std::vector<Job>& jobs);
  // The caller's current stream on `device` waits until operation `number` is over.
  void wait_for(uint32_t number, at::Device device);
  // Lets every stream pass that waits here or will; after a failure. May have to be repeated.
  void release();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::comm
