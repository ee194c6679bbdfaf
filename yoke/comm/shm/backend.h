// SPDX-License-Identifier: Apache-2.0
// The shm backend: ranks are processes of one host, or threads of several, and work on memory that
// all of them have mapped. CPU tensors. Nothing has a name in the file system, so nothing is left
// behind however a process ends. Tensors from allocate() are used where they lie; others are copied
// into shared memory and back.
#pragma once

#include "yoke/comm/backend_factory.h"

namespace yoke::comm {

BackendFactory shm_backend();

}  // namespace yoke::comm
