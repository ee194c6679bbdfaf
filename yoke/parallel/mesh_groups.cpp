// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/mesh_groups.h"

namespace yoke::parallel {

MeshGroups::MeshGroups(const comm::Communicator& world, MeshShape shape)
    : mesh({{"pp", shape.pp}, {"dp", shape.dp}, {"tp", shape.tp}}, world.size()), world(world) {
  auto split = [&](std::initializer_list<std::string_view> axes) {
    return world.split(mesh.group(world.rank(), axes).front(), world.rank());
  };
  pp = split({"pp"});
  dp = split({"dp"});
  tp = split({"tp"});
  across = split({"pp", "tp"});
}

}  // namespace yoke::parallel
