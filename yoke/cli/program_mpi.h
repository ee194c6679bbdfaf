// SPDX-License-Identifier: Apache-2.0
// The mpi backend, where the program is linked with MPI: `yoke-mpi` is (with_mpi.cpp), `yoke` is
// not (without_mpi.cpp), so that it starts on a host without MPI.
#pragma once

#include "yoke/comm/backend_factory.h"

namespace yoke::cli {

comm::BackendFactory program_mpi_backend();

}  // namespace yoke::cli
