// SPDX-License-Identifier: Apache-2.0
// The ranks of a world as a mesh of named axes. Neighbours along tp are neighbours in the world,
// because they talk most; then those along dp; pp comes last. Collective: construction.
#pragma once

#include "yoke/comm/communicator.h"

namespace yoke::parallel {

struct MeshShape {
  int pp = 1;  // stages of a pipeline
  int dp = 1;  // replicas
  int tp = 1;  // parts of a layer
  int size() const { return pp * dp * tp; }
};

// One rank's groups: those it shares all other coordinates with.
struct Mesh {
  // Throws Kind::Usage where the degrees do not multiply to the number of ranks.
  Mesh(const comm::Communicator& world, MeshShape shape);

  MeshShape shape;
  comm::Communicator world, pp, dp, tp;
  comm::Communicator across;  // pp and tp: the other parameters of this replica
};

}  // namespace yoke::parallel
