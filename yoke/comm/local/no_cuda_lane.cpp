// SPDX-License-Identifier: Apache-2.0
// The twin of cuda_lane.cpp in a build without CUDA: Communicator refuses CUDA tensors, so nothing
// but cuda_available() and, for a rank that asks for a GPU, cuda_enter() can be reached.
#include "yoke/base/error.h"
#include "yoke/comm/local/cuda_lane.h"

namespace yoke::comm {
namespace {
[[noreturn]] void unreachable() { fail(Kind::Internal, "this build of Yoke has no CUDA"); }
}  // namespace

struct CudaLane::Impl {};

bool cuda_available() { return false; }
void cuda_use(int) { unreachable(); }
void cuda_enter(int device) {
  fail(Kind::Device, "cuda:", device,
       " was asked for, but this build has no CUDA; build with ./dev build --preset cuda");
}
std::shared_ptr<CudaEvent> cuda_mark(at::Device) { unreachable(); }
std::shared_ptr<CudaEvent> cuda_mark_busy(at::Device) { unreachable(); }
void cuda_wait(const CudaEvent&, at::Device) { unreachable(); }
bool cuda_passed(const CudaEvent&) { unreachable(); }
at::Tensor cuda_fold(const std::vector<at::Tensor>&, ReduceOp) { unreachable(); }

CudaLane::CudaLane() = default;
CudaLane::~CudaLane() = default;
std::shared_ptr<CudaEvent> CudaLane::launch(uint32_t, const std::vector<Operation>&,
                                            const std::vector<std::shared_ptr<CudaEvent>>&,
                                            const std::vector<Job>&) {
  unreachable();
}
void CudaLane::wait_for(uint32_t, at::Device) { unreachable(); }
void CudaLane::release() { unreachable(); }

}  // namespace yoke::comm
