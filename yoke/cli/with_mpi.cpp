// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/program_mpi.h"
#include "yoke/comm/mpi/backend.h"

namespace yoke::cli {

comm::BackendFactory program_mpi_backend() { return comm::mpi_backend(); }

}  // namespace yoke::cli
