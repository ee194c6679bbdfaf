// SPDX-License-Identifier: Apache-2.0
// The MPI backend: each rank is a process that an MPI launcher started, tensors lie in CPU memory.
// MPI moves the bytes; sums are made here, in rank order, with the same bits as the local backend.
// MPI is started at the first use and ends with the process; after a failure it is not ended,
// because that would wait for the rank that is gone.
#pragma once

#include "yoke/comm/backend_factory.h"

namespace yoke::comm {

BackendFactory mpi_backend();

}  // namespace yoke::comm
