// SPDX-License-Identifier: Apache-2.0
// The twin of the nccl backend in a build without CUDA.
#include "yoke/base/error.h"
#include "yoke/comm/nccl/backend.h"

namespace yoke::comm {

BackendFactory nccl_backend(NcclOptions) {
  return {.name = "nccl", .connect = [](const auto&, const auto&) -> std::vector<Communicator> {
            fail(Kind::Device,
                 "this build has no CUDA: the nccl backend needs it; build with ./dev build "
                 "--preset cuda, or choose local, shm or mpi");
          }};
}

}  // namespace yoke::comm
