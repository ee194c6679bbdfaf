// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/cgroup.h"

#include <algorithm>
#include <fstream>
#include <string>

#include "yoke/base/text.h"

namespace yoke::topo {
namespace {

namespace fs = std::filesystem;

// The words of a small file; none when it cannot be read.
std::vector<std::string> words(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> result;
  for (std::string word; in >> word;) result.push_back(word);
  return result;
}

std::optional<int64_t> number(const fs::path& file) {
  const auto text = words(file);
  return text.empty() ? std::nullopt : parse_int(text[0]);
}

void tighten_cpus(CgroupLimits& limits, std::optional<int64_t> quota,
                  std::optional<int64_t> period) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return;
  const double cpus = double(*quota) / double(*period);
  if (!limits.cpus || cpus < *limits.cpus) limits.cpus = cpus;
}

void tighten_memory(CgroupLimits& limits, const fs::path& limit_file, const fs::path& used_file) {
  const auto limit = number(limit_file);
  // Version 1 writes "no limit" as a number just below 2^63.
  if (!limit || *limit <= 0 || *limit >= int64_t{1} << 60) return;
  if (limits.memory_bytes && uint64_t(*limit) >= *limits.memory_bytes) return;
  limits.memory_bytes = uint64_t(*limit);
  limits.memory_used_bytes = uint64_t(std::max<int64_t>(0, number(used_file).value_or(0)));
}

void read_group(CgroupLimits& limits, const fs::path& group) {
  if (const auto quota = words(group / "cpu.max"); quota.size() == 2)
    tighten_cpus(limits, parse_int(quota[0]), parse_int(quota[1]));
  tighten_cpus(limits, number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us"));
  tighten_memory(limits, group / "memory.max", group / "memory.current");
  tighten_memory(limits, group / "memory.limit_in_bytes", group / "memory.usage_in_bytes");
}

}  // namespace

CgroupLimits cgroup_limits(const fs::path& root) {
  CgroupLimits limits;
  std::ifstream groups(root / "proc/self/cgroup");
  // "0::/path" is version 2; "4:memory:/path" or "1:cpu,cpuacct:/path" one hierarchy of version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path mount = root / "sys/fs/cgroup" / controllers;
    // Inside a container the path may be the host's and not exist here; its ancestors may.
    fs::path path = fs::path(line.substr(second + 1)).relative_path();
    while (!path.empty()) {
      read_group(limits, mount / path);
      path = path.parent_path();
    }
    read_group(limits, mount);
  }
  return limits;
}

}  // namespace yoke::topo
