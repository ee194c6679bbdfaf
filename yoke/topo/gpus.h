// SPDX-License-Identifier: Apache-2.0
// The GPUs of this host and the links between them, as the NVIDIA driver's management library
// (NVML) tells. NVML is opened at run time and needs no CUDA context.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "yoke/topo/device.h"
#include "yoke/topo/library.h"

namespace yoke::topo {

struct Gpu {
  std::string name = {};
  std::string uuid = {};
  std::string pci_bus = {};  // "00000000:19:00.0"
  uint64_t memory_bytes = 0;
  uint64_t free_bytes = 0;
};

enum class LinkKind { NvLink, Pcie, System };  // System: over PCIe and between CPU sockets

struct Link {
  Device a = {}, b = {};
  LinkKind kind = LinkKind::Pcie;
  double bytes_per_second = 0;  // nominal, one direction; 0 where the driver does not tell
};

struct GpuScan {
  std::vector<Gpu> gpus = {};    // in the order of the PCI bus
  std::vector<Link> links = {};  // each pair once, the lower index first
  std::string driver = {};       // "580.82"
  std::string reason = {};       // why there are none, or fewer than the driver counts
};

// Never throws: a host without the driver is an ordinary host.
GpuScan scan_gpus(const OpenLibrary& open = open_library);

// What is left of a scan under CUDA_VISIBLE_DEVICES, numbered as CUDA then numbers it: indices or
// (the beginning of) UUIDs, ending at the first that is unknown. NVML itself ignores the variable.
// GPUs of different speeds need CUDA_DEVICE_ORDER=PCI_BUS_ID for the two to number them alike.
GpuScan visible_gpus(const GpuScan& scan, const std::optional<std::string>& cuda_visible_devices);

// Floating point operations a second by the data sheet, without sparsity: of matrices in 16 bits
// with sums in float32, or in float32. 0: not known.
double peak_flops(const std::string& gpu_name, bool in_16_bits);

const char* to_string(LinkKind kind);  // "NVLink", "PCIe", "PCIe across sockets"

}  // namespace yoke::topo
