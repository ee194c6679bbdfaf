// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/gpus.h"

#include <algorithm>
#include <array>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::topo {
namespace {

// The part of NVML's C interface that is used here, as its documentation gives it.
namespace nvml {
using Handle = struct Opaque*;
struct Memory {
  unsigned long long total, free, used;
};
struct PciInfo {
  char legacy_bus[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency_us;
  int type, status;
  union {
    double as_double;
    unsigned as_unsigned;
    unsigned long long as_unsigned_long;
  } value;
};
constexpr int kSuccess = 0;
constexpr int kP2pStatusOk = 0;
constexpr int kP2pNvLink = 2;
constexpr int kTopologySystem = 50;         // the path crosses the links between CPU sockets
constexpr unsigned kNvLinkSpeedField = 90;  // common speed of the active links, MB/s
constexpr int kUnsignedValue = 1;
constexpr unsigned kMaxNvLinks = 36;
}  // namespace nvml

// A function that this driver's library does not have is null.
struct Nvml {
  const Library& library;
  using Text = int(nvml::Handle, char*, unsigned);
  using Number = int(nvml::Handle, unsigned*);
  int (*init)() = library.function<int()>("nvmlInit_v2");
  int (*shutdown)() = library.function<int()>("nvmlShutdown");
  const char* (*error_string)(int) = library.function<const char*(int)>("nvmlErrorString");
  int (*driver_version)(char*, unsigned) =
      library.function<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
  int (*count)(unsigned*) = library.function<int(unsigned*)>("nvmlDeviceGetCount_v2");
  int (*handle)(unsigned, nvml::Handle*) =
      library.function<int(unsigned, nvml::Handle*)>("nvmlDeviceGetHandleByIndex_v2");
  Text* name = library.function<Text>("nvmlDeviceGetName");
  Text* uuid = library.function<Text>("nvmlDeviceGetUUID");
  int (*memory)(nvml::Handle, nvml::Memory*) =
      library.function<int(nvml::Handle, nvml::Memory*)>("nvmlDeviceGetMemoryInfo");
  int (*pci)(nvml::Handle, nvml::PciInfo*) =
      library.function<int(nvml::Handle, nvml::PciInfo*)>("nvmlDeviceGetPciInfo_v3");
  Number* pcie_generation = library.function<Number>("nvmlDeviceGetMaxPcieLinkGeneration");
  Number* pcie_width = library.function<Number>("nvmlDeviceGetMaxPcieLinkWidth");
  int (*nvlink_state)(nvml::Handle, unsigned, int*) =
      library.function<int(nvml::Handle, unsigned, int*)>("nvmlDeviceGetNvLinkState");
  int (*field_values)(nvml::Handle, int, nvml::FieldValue*) =
      library.function<int(nvml::Handle, int, nvml::FieldValue*)>("nvmlDeviceGetFieldValues");
  int (*p2p_status)(nvml::Handle, nvml::Handle, int, int*) =
      library.function<int(nvml::Handle, nvml::Handle, int, int*)>("nvmlDeviceGetP2PStatus");
  int (*ancestor)(nvml::Handle, nvml::Handle, int*) =
      library.function<int(nvml::Handle, nvml::Handle, int*)>(
          "nvmlDeviceGetTopologyCommonAncestor");

  // Without these there is nothing to list; the others only fill in what is known.
  bool usable() const { return init && shutdown && count && handle; }
};

std::string why(const Nvml& api, int code) {
  const char* text = api.error_string ? api.error_string(code) : nullptr;
  return text ? text : cat("error ", code);
}

std::string text_of(Nvml::Text* function, nvml::Handle device) {
  std::array<char, 128> text{};
  if (!function || function(device, text.data(), text.size() - 1) != nvml::kSuccess) return "";
  return text.data();
}

Gpu describe(const Nvml& api, nvml::Handle device) {
  Gpu gpu{.name = text_of(api.name, device), .uuid = text_of(api.uuid, device)};
  if (nvml::Memory memory{}; api.memory && api.memory(device, &memory) == nvml::kSuccess) {
    gpu.memory_bytes = memory.total;
    gpu.free_bytes = memory.free;
  }
  if (nvml::PciInfo pci{}; api.pci && api.pci(device, &pci) == nvml::kSuccess)
    gpu.pci_bus.assign(pci.bus_id, std::find(pci.bus_id, std::end(pci.bus_id), '\0'));
  return gpu;
}

double pcie_bytes_per_second(const Nvml& api, nvml::Handle device) {
  // Per lane and direction, after the line code, generations 1 to 6.
  static constexpr std::array kLane = {0.25e9, 0.5e9, 0.985e9, 1.969e9, 3.938e9, 7.563e9};
  unsigned generation = 0, width = 0;
  if (!api.pcie_generation || api.pcie_generation(device, &generation) != nvml::kSuccess ||
      !api.pcie_width || api.pcie_width(device, &width) != nvml::kSuccess || generation == 0)
    return 0;
  return kLane[std::min<size_t>(generation, kLane.size()) - 1] * width;
}

// All active NVLinks of a GPU together: what a pair can use where a switch joins them.
double nvlink_bytes_per_second(const Nvml& api, nvml::Handle device) {
  unsigned active = 0;
  for (unsigned link = 0; api.nvlink_state && link < nvml::kMaxNvLinks; ++link) {
    int state = 0;
    if (api.nvlink_state(device, link, &state) != nvml::kSuccess) break;
    active += state == 1;
  }
  nvml::FieldValue speed{};
  speed.field = nvml::kNvLinkSpeedField;
  if (!api.field_values || api.field_values(device, 1, &speed) != nvml::kSuccess ||
      speed.status != nvml::kSuccess || speed.type != nvml::kUnsignedValue)
    return 0;
  return active * 1e6 * speed.value.as_unsigned;
}

// Nothing where the driver tells nothing about the pair.
std::optional<LinkKind> kind_between(const Nvml& api, nvml::Handle a, nvml::Handle b) {
  int value = 0;
  if (api.p2p_status && api.p2p_status(a, b, nvml::kP2pNvLink, &value) == nvml::kSuccess &&
      value == nvml::kP2pStatusOk)
    return LinkKind::NvLink;
  if (!api.ancestor || api.ancestor(a, b, &value) != nvml::kSuccess) return std::nullopt;
  return value >= nvml::kTopologySystem ? LinkKind::System : LinkKind::Pcie;
}

void scan(const Nvml& api, GpuScan& found) {
  if (std::array<char, 96> text{};
      api.driver_version && api.driver_version(text.data(), text.size() - 1) == nvml::kSuccess)
    found.driver = text.data();
  unsigned count = 0;
  if (const int code = api.count(&count); code != nvml::kSuccess) {
    found.reason = cat("NVML cannot count the GPUs: ", why(api, code));
    return;
  }
  if (count == 0) found.reason = "the NVIDIA driver is there and counts no GPU";
  std::vector<nvml::Handle> handles;
  for (unsigned i = 0; i < count; ++i) {
    nvml::Handle device = nullptr;
    if (const int code = api.handle(i, &device); code != nvml::kSuccess) {
      found.reason = cat("GPU ", i, " of ", count, " does not answer: ", why(api, code));
      continue;
    }
    handles.push_back(device);
    found.gpus.push_back(describe(api, device));
  }
  for (size_t a = 0; a < handles.size(); ++a)
    for (size_t b = a + 1; b < handles.size(); ++b)
      if (const auto kind = kind_between(api, handles[a], handles[b])) {
        const auto speed =
            *kind == LinkKind::NvLink ? nvlink_bytes_per_second : pcie_bytes_per_second;
        found.links.push_back(
            {.a = {DeviceKind::Cuda, int(a)},
             .b = {DeviceKind::Cuda, int(b)},
             .kind = *kind,
             .bytes_per_second = std::min(speed(api, handles[a]), speed(api, handles[b]))});
      }
}

// The position in the scan that one entry of CUDA_VISIBLE_DEVICES names.
std::optional<int> position(const std::vector<Gpu>& gpus, const std::string& entry) {
  if (const auto index = parse_int(entry))
    return *index >= 0 && *index < int64_t(gpus.size()) ? std::optional(int(*index)) : std::nullopt;
  if (!entry.starts_with("GPU-")) return std::nullopt;
  const auto gpu = std::ranges::find_if(gpus, [&](auto& g) { return g.uuid.starts_with(entry); });
  return gpu == gpus.end() ? std::nullopt : std::optional(int(gpu - gpus.begin()));
}

}  // namespace

GpuScan scan_gpus(const OpenLibrary& open) {
  const Library library = open("libnvidia-ml.so.1");
  if (!library) return {.reason = cat("no NVIDIA driver: ", library.error)};
  const Nvml api{library};
  if (!api.usable())
    return {.reason = "libnvidia-ml.so.1 lacks NVML's functions: update the driver"};
  if (const int code = api.init(); code != nvml::kSuccess)
    return {.reason = cat("the NVIDIA driver does not start: ", why(api, code))};
  GpuScan found;
  scan(api, found);
  api.shutdown();
  return found;
}

GpuScan visible_gpus(const GpuScan& scan, const std::optional<std::string>& cuda_visible_devices) {
  if (!cuda_visible_devices) return scan;
  GpuScan visible{.driver = scan.driver, .reason = scan.reason};
  std::vector<int> positions;
  for (const auto& entry : split(*cuda_visible_devices, ',')) {
    const auto found = position(scan.gpus, entry);
    if (!found || std::ranges::count(positions, *found) > 0) break;
    positions.push_back(*found);
    visible.gpus.push_back(scan.gpus[size_t(*found)]);
  }
  for (size_t a = 0; a < positions.size(); ++a)
    for (size_t b = a + 1; b < positions.size(); ++b)
      for (Link link : scan.links)
        if (link.a.index == std::min(positions[a], positions[b]) &&
            link.b.index == std::max(positions[a], positions[b])) {
          link.a.index = int(a);
          link.b.index = int(b);
          visible.links.push_back(link);
        }
  if (visible.gpus.size() < scan.gpus.size())
    visible.reason = cat("CUDA_VISIBLE_DEVICES='", *cuda_visible_devices, "' leaves ",
                         visible.gpus.size(), " of ", scan.gpus.size(), " GPUs");
  return visible;
}

namespace {

// "L4" is not in "L40".
bool has_word(const std::string& text, const std::string& word) {
  const size_t at = text.find(word);
  if (at == std::string::npos) return false;
  const auto is_part = [&](size_t i) {
    return i < text.size() && std::isalnum(static_cast<unsigned char>(text[i]));
  };
  return !is_part(at + word.size()) && (at == 0 || !is_part(at - 1));
}

}  // namespace

double peak_flops(const std::string& gpu_name, bool in_16_bits) {
  struct Peak {
    const char* name;
    double tera_16, tera_32;
  };
  // A name that is part of another comes after it.
  static constexpr Peak kPeaks[] = {
      {"H100 PCIe", 756, 51.2},  {"H100 NVL", 835, 60}, {"H100", 989.4, 66.9},
      {"H200", 989.4, 66.9},     {"B200", 2250, 75},    {"A100", 312, 19.5},
      {"A40", 149.7, 37.4},      {"A10", 125, 31.2},    {"L40S", 362, 91.6},
      {"L4", 121, 30.3},         {"V100", 125, 15.7},   {"T4", 65, 8.1},
      {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71, 35.6}};
  for (const auto& [name, tera_16, tera_32] : kPeaks)
    if (has_word(gpu_name, name)) return (in_16_bits ? tera_16 : tera_32) * 1e12;
  return 0;
}

const char* to_string(LinkKind kind) {
  switch (kind) {
    case LinkKind::NvLink:
      return "NVLink";
    case LinkKind::Pcie:
      return "PCIe";
    case LinkKind::System:
      return "PCIe across sockets";
  }
  return "unknown";
}

}  // namespace yoke::topo
