// SPDX-License-Identifier: Apache-2.0
// A device that a rank drives, and the text by which a user names the devices of all ranks:
//
//   cpu  cpu:4           one rank, four ranks sharing the host's cores
//   cuda:1  cuda:0,2     one rank on each GPU named
//   cuda:0-3  cuda       ... on each of the range, on every GPU of the host
//   cuda:0x4             four ranks on GPU 0
//   auto                 every GPU of the host, or one CPU rank where there is none
#pragma once

#include <compare>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::topo {

struct Host;

enum class DeviceKind { Cpu, Cuda };

struct Device {
  DeviceKind kind = DeviceKind::Cpu;
  int index = 0;  // of the GPU as CUDA numbers the visible ones; 0 for the CPU, which ranks share
  auto operator<=>(const Device&) const = default;
};

// More ranks than this on one host is taken for a typing error.
inline constexpr int kMaxRanksPerHost = 1024;

// One device for each rank, in rank order. With a host, GPUs that it does not have are refused;
// `auto` and `cuda` need one. Throws Kind::Usage.
std::vector<Device> parse_devices(std::string_view text, const Host* host = nullptr);

std::string to_text(const Device& device);             // "cpu", "cuda:1"
std::string to_text(std::span<const Device> devices);  // what parse_devices() reads: "cuda:0-3"

}  // namespace yoke::topo
