// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/host.h"

#include <hwloc.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <thread>

#include "yoke/topo/cgroup.h"

namespace yoke::topo {
namespace {

void read_cores(Host& host) {
  host.num_cpus = host.num_cores = std::max(1, int(std::thread::hardware_concurrency()));
  host.num_usable_cpus = host.num_cpus;
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return;
  const std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)> topology(
      raw, hwloc_topology_destroy);
  // Without the flag hwloc hides the CPUs that a control group keeps from us.
  hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  if (hwloc_topology_load(raw) != 0) return;
  const auto count = [&](hwloc_obj_type_t type) {
    return std::max(0, hwloc_get_nbobjs_by_type(raw, type));
  };
  host.num_cpus = std::max(1, count(HWLOC_OBJ_PU));
  host.num_cores = count(HWLOC_OBJ_CORE) > 0 ? count(HWLOC_OBJ_CORE) : host.num_cpus;
  host.num_numa_nodes = std::max(1, count(HWLOC_OBJ_NUMANODE));
  const std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)> bound(hwloc_bitmap_alloc(),
                                                                            hwloc_bitmap_free);
  host.num_usable_cpus = host.num_cpus;
  if (hwloc_get_cpubind(raw, bound.get(), HWLOC_CPUBIND_PROCESS) == 0 &&
      hwloc_bitmap_weight(bound.get()) > 0)
    host.num_usable_cpus = std::min(host.num_cpus, hwloc_bitmap_weight(bound.get()));
}

// "MemTotal:       32653412 kB"
void read_memory(Host& host, const std::filesystem::path& root) {
  std::ifstream in(root / "proc/meminfo");
  for (std::string name, unit; in >> name;) {
    uint64_t kib = 0;
    in >> kib;
    std::getline(in, unit);
    if (name == "MemTotal:") host.memory_bytes = kib * 1024;
    if (name == "MemAvailable:") host.available_memory_bytes = kib * 1024;
  }
}

void apply(const CgroupLimits& limits, Host& host) {
  // A quota of 1.5 CPUs feeds one busy thread and a half: count what runs without being throttled.
  if (limits.cpus) host.num_usable_cpus = std::clamp(int(*limits.cpus), 1, host.num_usable_cpus);
  if (!limits.memory_bytes) return;
  const uint64_t limit = *limits.memory_bytes;
  host.memory_bytes = std::min(host.memory_bytes, limit);
  const uint64_t left = limit - std::min(limit, limits.memory_used_bytes);
  host.available_memory_bytes = std::min(host.available_memory_bytes, left);
}

void read_shm(Host& host, const std::filesystem::path& root) {
  struct statvfs shm {};
  if (::statvfs((root / "dev/shm").c_str(), &shm) != 0) return;
  host.shm_bytes = uint64_t(shm.f_blocks) * shm.f_frsize;
  host.free_shm_bytes = uint64_t(shm.f_bavail) * shm.f_frsize;
}

}  // namespace

Host read_host(const HostOptions& options) {
  Host host;
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) == 0) host.name = name.data();
  read_cores(host);
  read_memory(host, options.root);
  apply(cgroup_limits(options.root), host);
  read_shm(host, options.root);
  GpuScan scan = visible_gpus(scan_gpus(options.open), options.cuda_visible_devices);
  host.gpus = std::move(scan.gpus);
  host.links = std::move(scan.links);
  host.driver = std::move(scan.driver);
  host.no_gpus = std::move(scan.reason);
  return host;
}

}  // namespace yoke::topo
