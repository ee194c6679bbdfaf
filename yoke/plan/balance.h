// SPDX-License-Identifier: Apache-2.0
// Cutting a sequence of layers into stages.
#pragma once

#include <vector>

namespace yoke::plan {

// How many of the layers each of the parts gets, one after the other and none empty, so that the
// dearest part is as cheap as can be. Throws Kind::Usage where there are fewer layers than parts,
// or a cost is below 0.
std::vector<int> balance(const std::vector<double>& costs, int parts);

}  // namespace yoke::plan
