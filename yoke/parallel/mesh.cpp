// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/mesh.h"

#include "yoke/base/error.h"

namespace yoke::parallel {

Mesh::Mesh(const comm::Communicator& world, MeshShape shape) : shape(shape), world(world) {
  const auto [p, d, t] = shape;
  if (p < 1 || d < 1 || t < 1 || shape.size() != world.size())
    fail(Kind::Usage, "pp x dp x tp = ", p, " x ", d, " x ", t, " = ", shape.size(),
         " ranks, and there are ", world.size());
  const int rank = world.rank();
  const int tp_rank = rank % t, dp_rank = rank / t % d, pp_rank = rank / (t * d);
  pp = world.split(rank % (d * t), rank);
  dp = world.split(pp_rank * t + tp_rank, rank);
  tp = world.split(rank / t, rank);
  across = world.split(dp_rank, rank);
}

}  // namespace yoke::parallel
