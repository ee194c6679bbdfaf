// SPDX-License-Identifier: Apache-2.0
// One rank's groups on the mesh of a run: those it shares all other coordinates with. Neighbours
// along tp are neighbours in the world, because they talk most; then those along dp; pp comes last.
// Collective: construction.
#pragma once

#include "yoke/comm/communicator.h"
#include "yoke/topo/mesh.h"

namespace yoke::parallel {

struct MeshShape {
  int pp = 1;  // stages of a pipeline
  int dp = 1;  // replicas
  int tp = 1;  // parts of a layer
  int size() const { return pp * dp * tp; }
};

struct MeshGroups {
  // Throws Kind::Usage with the numbers where the degrees do not multiply to the number of ranks.
  MeshGroups(const comm::Communicator& world, MeshShape shape);

  topo::Mesh mesh;
  comm::Communicator world, pp, dp, tp;
  comm::Communicator across;  // pp and tp: the other parameters of this replica
};

}  // namespace yoke::parallel
