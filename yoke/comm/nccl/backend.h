// SPDX-License-Identifier: Apache-2.0
// The nccl backend: CUDA tensors, ranks that are threads or processes on one or many hosts. NCCL is
// looked for at run time. Several ranks on one GPU need NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1
// and few channels (NCCL_MAX_NCHANNELS=2): their kernels must fit on the GPU together.
// A build without CUDA has no_nccl.cpp instead, whose factory refuses to connect.
#pragma once

#include <string>

#include "yoke/comm/backend_factory.h"

namespace yoke::comm {

struct NcclOptions {
  std::string file = {};  // run.nccl; empty: the libnccl.so.2 that LibTorch has loaded
};

BackendFactory nccl_backend(NcclOptions options = {});

}  // namespace yoke::comm
