// SPDX-License-Identifier: Apache-2.0
// The share of the machine that a container or a batch system leaves to this process (Linux control
// groups, versions 1 and 2). Limits of enclosing groups count too: the tightest is given.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace yoke::topo {

struct CgroupLimits {
  std::optional<double> cpus = {};            // quota / period; nothing: no limit
  std::optional<uint64_t> memory_bytes = {};  // nothing: no limit
  uint64_t memory_used_bytes = 0;             // by the group whose limit is given
};

// Reads /proc/self/cgroup and /sys/fs/cgroup below `root`. Never throws: what cannot be read is no
// limit.
CgroupLimits cgroup_limits(const std::filesystem::path& root = "/");

}  // namespace yoke::topo
