// SPDX-License-Identifier: Apache-2.0
// What this host has for ranks to use: cores (by hwloc), memory, shared memory, GPUs and the links
// between them. A plain value: read it once, pass it on; tests write their own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "yoke/topo/gpus.h"

namespace yoke::topo {

struct Host {
  std::string name = {};
  int num_cores = 1;        // physical cores
  int num_cpus = 1;         // logical CPUs of the machine
  int num_usable_cpus = 1;  // of these, what affinity and the control group's quota leave us
  int num_numa_nodes = 1;
  uint64_t memory_bytes = 0;            // of the machine, or the control group's limit if smaller
  uint64_t available_memory_bytes = 0;  // what can be had now without swapping
  uint64_t shm_bytes = 0;               // size of /dev/shm; 0 if there is none
  uint64_t free_shm_bytes = 0;
  std::vector<Gpu> gpus = {};  // the visible ones, as CUDA numbers them
  std::vector<Link> links = {};
  std::string driver = {};   // version of the NVIDIA driver, empty without one
  std::string no_gpus = {};  // why gpus is empty or shorter than it might be
};

struct HostOptions {
  std::optional<std::string> cuda_visible_devices = {};  // the variable's value, if it is set
  OpenLibrary open = open_library;
  std::filesystem::path root = "/";  // where /proc, /sys/fs/cgroup and /dev/shm are found
};

// Never throws for what is missing: it is 0 or empty then.
Host read_host(const HostOptions& options = {});

}  // namespace yoke::topo
