// SPDX-License-Identifier: Apache-2.0
// Whether both ends of each channel agree on datatype and sizes (Rule::Shapes of prove.h). Sizes of
// one name are one size in all of the programs; a size that varies within bounds leaves those that
// both ends allow.
#pragma once

#include <optional>
#include <vector>

#include "yoke/plan/prove.h"

namespace yoke::plan {

// Of a program and its parts, as with_parts() gives them.
std::optional<Knot> find_clash(const std::vector<const Program*>& programs);

}  // namespace yoke::plan
