// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/error.h"
#include "yoke/cli/program_mpi.h"

namespace yoke::cli {

comm::BackendFactory program_mpi_backend() {
  fail(Kind::Usage,
       "this program has no mpi backend; use yoke-mpi, its twin that is linked with MPI");
}

}  // namespace yoke::cli
