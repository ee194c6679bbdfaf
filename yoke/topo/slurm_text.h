// SPDX-License-Identifier: Apache-2.0
// The two compressed texts of Slurm's environment.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace yoke::topo {

// "n[1-2,07-08],login" -> n1 n2 n07 n08 login. Throws Kind::Usage when malformed.
std::vector<std::string> expand_nodelist(std::string_view text);

// "1(x2),3" -> 1 1 3, the number of tasks of each node. Throws Kind::Usage when malformed.
std::vector<int> expand_tasks_per_node(std::string_view text);

}  // namespace yoke::topo
