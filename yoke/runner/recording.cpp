// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/recording.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <exception>

namespace yoke::runner {
namespace {

constexpr int kRehearsals = 3;  // TorchScript still changes what it does in the second

}  // namespace

struct Recording::Impl {
  at::cuda::CUDAGraph graph = {};
  const c10::MempoolId_t pool = at::cuda::graph_pool_handle();
};

Recording::Recording(const Values& inputs) : inputs_(inputs), impl_(std::make_unique<Impl>()) {}
Recording::~Recording() = default;

std::unique_ptr<Recording> Recording::make(const Work& work, const Values& inputs) {
  for (int i = 0; i < kRehearsals; ++i) work(inputs);
  c10::cuda::getCurrentCUDAStream().synchronize();
  std::unique_ptr<Recording> made(new Recording(inputs));
  auto& impl = *made->impl_;
  // Other replicas in this process go on meanwhile.
  impl.graph.capture_begin(impl.pool, cudaStreamCaptureModeThreadLocal);
  std::exception_ptr thrown;
  try {
    made->outputs_ = work(inputs);
  } catch (const std::exception&) {
    thrown = std::current_exception();
  }
  try {
    impl.graph.capture_end();
  } catch (const std::exception&) {
    if (!thrown) thrown = std::current_exception();
    // It ended the capture, and then threw before it told the allocator.
    c10::cuda::CUDACachingAllocator::endAllocateToPool(c10::cuda::current_device(), impl.pool);
    cudaGetLastError();
  }
  if (thrown) std::rethrow_exception(thrown);
  return made;
}

const Values& Recording::replay() {
  impl_->graph.replay();
  return outputs_;
}

}  // namespace yoke::runner
