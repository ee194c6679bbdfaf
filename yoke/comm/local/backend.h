// SPDX-License-Identifier: Apache-2.0
// The local backend: ranks are threads of one process and hand each other pointers. CPU tensors,
// and CUDA tensors where the build has CUDA.
#pragma once

#include "yoke/comm/backend_factory.h"

namespace yoke::comm {

BackendFactory local_backend();

}  // namespace yoke::comm
