// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/host.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "yoke/base/error.h"
#include "yoke/topo/cgroup.h"

using namespace yoke;
using namespace yoke::topo;
namespace fs = std::filesystem;

namespace {

// A driver of three GPUs: 0 and 1 by NVLink, 2 across the sockets. Handles are index + 1.
namespace fake {
int init_code = 0;
unsigned lost = 99;  // the GPU that does not answer
unsigned index(void* handle) { return unsigned(reinterpret_cast<uintptr_t>(handle)) - 1; }

int init() { return init_code; }
int shutdown() { return 0; }
const char* error_string(int code) { return code == 15 ? "GPU is lost" : "Driver Not Loaded"; }
int driver(char* text, unsigned size) {
  std::snprintf(text, size, "580.82");
  return 0;
}
int count(unsigned* n) {
  *n = 3;
  return 0;
}
int handle(unsigned i, void** out) {
  *out = reinterpret_cast<void*>(uintptr_t{i} + 1);
  return i == lost ? 15 : 0;
}
int name(void*, char* text, unsigned size) {
  std::snprintf(text, size, "H200");
  return 0;
}
int uuid(void* device, char* text, unsigned size) {
  std::snprintf(text, size, "GPU-%c%c", 'a' + index(device), 'z');
  return 0;
}
int memory(void*, unsigned long long* total_free_used) {
  total_free_used[0] = 100;
  total_free_used[1] = 90;
  total_free_used[2] = 10;
  return 0;
}
int pci(void* device, char* info) {
  std::snprintf(info + 36, 32, "00000000:0%u:00.0", index(device));
  return 0;
}
int generation(void*, unsigned* value) {
  *value = 5;
  return 0;
}
int width(void*, unsigned* value) {
  *value = 16;
  return 0;
}
int nvlink_state(void*, unsigned link, int* active) {
  *active = link != 3;
  return link < 18 ? 0 : 2;
}
struct Field {
  unsigned field, scope;
  long long timestamp, latency;
  int type, status;
  unsigned value;
};
int field_values(void*, int, Field* field) {
  field->type = 1;
  field->status = field->field == 90 ? 0 : 3;
  field->value = 26562;
  return 0;
}
int p2p(void* a, void* b, int, int* status) {
  *status = index(a) + index(b) == 1 ? 0 : 5;
  return 0;
}
int ancestor(void*, void*, int* level) {
  *level = 50;
  return 0;
}
}  // namespace fake

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

const std::map<std::string, void*> kNvml = {
    {"nvmlInit_v2", address(fake::init)},
    {"nvmlShutdown", address(fake::shutdown)},
    {"nvmlErrorString", address(fake::error_string)},
    {"nvmlSystemGetDriverVersion", address(fake::driver)},
    {"nvmlDeviceGetCount_v2", address(fake::count)},
    {"nvmlDeviceGetHandleByIndex_v2", address(fake::handle)},
    {"nvmlDeviceGetName", address(fake::name)},
    {"nvmlDeviceGetUUID", address(fake::uuid)},
    {"nvmlDeviceGetMemoryInfo", address(fake::memory)},
    {"nvmlDeviceGetPciInfo_v3", address(fake::pci)},
    {"nvmlDeviceGetMaxPcieLinkGeneration", address(fake::generation)},
    {"nvmlDeviceGetMaxPcieLinkWidth", address(fake::width)},
    {"nvmlDeviceGetNvLinkState", address(fake::nvlink_state)},
    {"nvmlDeviceGetFieldValues", address(fake::field_values)},
    {"nvmlDeviceGetP2PStatus", address(fake::p2p)},
    {"nvmlDeviceGetTopologyCommonAncestor", address(fake::ancestor)},
};

// A library with the functions of the table, less the ones named.
OpenLibrary driver(std::vector<std::string> without = {}) {
  return [without](const char* file) -> Library {
    if (std::string_view(file) != "libnvidia-ml.so.1") return {.error = "wrong file"};
    return {.symbol = [without](const char* name) -> void* {
      const auto found = kNvml.find(name);
      const bool gone = std::ranges::find(without, name) != without.end();
      return gone || found == kNvml.end() ? nullptr : found->second;
    }};
  };
}

class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "yoke_host_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~Folder() { fs::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

}  // namespace

TEST(Nvml, MissingDriverIsAnEmptyListWithAReason) {
  const auto scan = scan_gpus([](const char*) { return Library{.error = "not found"}; });
  EXPECT_TRUE(scan.gpus.empty());
  EXPECT_EQ(scan.reason, "no NVIDIA driver: not found");
}

TEST(Nvml, RealLoaderSaysWhichFileIsMissing) {
  const Library none = open_library("libyoke-no-such.so.1");
  EXPECT_FALSE(none);
  EXPECT_NE(none.error.find("libyoke-no-such.so.1"), std::string::npos);
  EXPECT_EQ(none.function<int()>("anything"), nullptr);
  const Library libc = open_library("libc.so.6");
  ASSERT_TRUE(libc) << libc.error;
  EXPECT_EQ(libc.function<int(const char*)>("atoi")("42"), 42);
}

TEST(Nvml, DriverThatDoesNotStartGivesItsReason) {
  fake::init_code = 9;
  const auto scan = scan_gpus(driver());
  fake::init_code = 0;
  EXPECT_EQ(scan.reason, "the NVIDIA driver does not start: Driver Not Loaded");
  EXPECT_EQ(scan_gpus([](const char*) {
              return Library{.symbol = [](const char*) -> void* { return nullptr; }};
            }).reason,
            "libnvidia-ml.so.1 lacks NVML's functions: update the driver");
}

TEST(Nvml, EveryGpuIsDescribed) {
  const auto scan = scan_gpus(driver());
  ASSERT_EQ(scan.gpus.size(), 3u);
  EXPECT_EQ(scan.gpus[1].name, "H200");
  EXPECT_EQ(scan.gpus[1].uuid, "GPU-bz");
  EXPECT_EQ(scan.gpus[1].pci_bus, "00000000:01:00.0");
  EXPECT_EQ(scan.gpus[1].memory_bytes, 100u);
  EXPECT_EQ(scan.gpus[1].free_bytes, 90u);
  EXPECT_EQ(scan.driver, "580.82");
  EXPECT_EQ(scan.reason, "");
}

TEST(Nvml, LinksTellNvLinkFromPcieWithTheirSpeed) {
  const auto scan = scan_gpus(driver());
  ASSERT_EQ(scan.links.size(), 3u);
  EXPECT_EQ(scan.links[0].kind, LinkKind::NvLink);
  EXPECT_DOUBLE_EQ(scan.links[0].bytes_per_second, 17 * 26562e6);
  EXPECT_EQ(scan.links[2].a.index, 1);
  EXPECT_EQ(scan.links[2].b.index, 2);
  EXPECT_EQ(scan.links[2].kind, LinkKind::System);
  EXPECT_DOUBLE_EQ(scan.links[2].bytes_per_second, 16 * 3.938e9);
  EXPECT_STREQ(to_string(scan.links[2].kind), "PCIe across sockets");
}

TEST(Nvml, OldDriverWithoutAllTheFunctionsStillLists) {
  const auto scan = scan_gpus(driver(
      {"nvmlDeviceGetUUID", "nvmlDeviceGetFieldValues", "nvmlDeviceGetTopologyCommonAncestor"}));
  ASSERT_EQ(scan.gpus.size(), 3u);
  EXPECT_EQ(scan.gpus[0].name, "H200");
  EXPECT_EQ(scan.gpus[0].uuid, "");
  ASSERT_EQ(scan.links.size(), 1u);
  EXPECT_EQ(scan.links[0].bytes_per_second, 0);
}

TEST(Nvml, LostGpuIsLeftOutWithItsReason) {
  fake::lost = 1;
  const auto scan = scan_gpus(driver());
  fake::lost = 99;
  EXPECT_EQ(scan.gpus.size(), 2u);
  EXPECT_EQ(scan.reason, "GPU 1 of 3 does not answer: GPU is lost");
}

TEST(Nvml, VisibleDevicesAreRenumberedAsCudaDoes) {
  const auto scan = scan_gpus(driver());
  EXPECT_EQ(visible_gpus(scan, std::nullopt).gpus.size(), 3u);
  const auto swapped = visible_gpus(scan, "2,0");
  ASSERT_EQ(swapped.gpus.size(), 2u);
  EXPECT_EQ(swapped.gpus[0].uuid, "GPU-cz");
  EXPECT_EQ(swapped.gpus[1].uuid, "GPU-az");
  ASSERT_EQ(swapped.links.size(), 1u);
  EXPECT_EQ(swapped.links[0].a.index, 0);
  EXPECT_EQ(swapped.links[0].b.index, 1);
  EXPECT_EQ(swapped.links[0].kind, LinkKind::System);
  EXPECT_EQ(visible_gpus(scan, "GPU-b").gpus[0].uuid, "GPU-bz");
  EXPECT_EQ(visible_gpus(scan, "1,7,0").gpus.size(), 1u);  // CUDA stops at the first unknown
  EXPECT_EQ(visible_gpus(scan, "").reason, "CUDA_VISIBLE_DEVICES='' leaves 0 of 3 GPUs");
}

TEST(Host, ReadsThisMachine) {
  const Host host = read_host();
  EXPECT_FALSE(host.name.empty());
  EXPECT_GE(host.num_cores, 1);
  EXPECT_GE(host.num_cpus, host.num_cores);
  EXPECT_GE(host.num_usable_cpus, 1);
  EXPECT_LE(host.num_usable_cpus, host.num_cpus);
  EXPECT_GE(host.num_numa_nodes, 1);
  EXPECT_GT(host.memory_bytes, 1u << 20);
  EXPECT_LE(host.available_memory_bytes, host.memory_bytes);
  EXPECT_TRUE(!host.gpus.empty() || !host.no_gpus.empty());
}

TEST(Host, LimitsOfTheControlGroupCount) {
  const Folder root;
  root.write("proc/meminfo", "MemTotal: 4000 kB\nMemFree: 9 kB\nMemAvailable:  3000 kB\n");
  root.write("proc/self/cgroup", "0::/job\n");
  root.write("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  root.write("sys/fs/cgroup/job/memory.max", "1024000\n");
  root.write("sys/fs/cgroup/job/memory.current", "24000\n");
  const Host host = read_host({.cuda_visible_devices = "0", .open = driver(), .root = root.path()});
  EXPECT_EQ(host.num_usable_cpus, 1);
  EXPECT_EQ(host.memory_bytes, 1024000u);
  EXPECT_EQ(host.available_memory_bytes, 1000000u);
  EXPECT_EQ(host.shm_bytes, 0u);
  EXPECT_EQ(host.gpus.size(), 1u);
}

TEST(Cgroup, TightestOfTheEnclosingGroupsCounts) {
  const Folder root;
  root.write("proc/self/cgroup", "0::/a/b\n");
  root.write("sys/fs/cgroup/a/cpu.max", "200000 100000\n");
  root.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  root.write("sys/fs/cgroup/cpu.max", "300000 100000\n");
  root.write("sys/fs/cgroup/memory.max", "6000\n");
  root.write("sys/fs/cgroup/a/b/memory.max", "max\n");
  root.write("sys/fs/cgroup/a/memory.max", "5000\n");
  const auto limits = cgroup_limits(root.path());
  EXPECT_EQ(limits.cpus, 2.0);
  EXPECT_EQ(limits.memory_bytes, 5000u);
}

TEST(Cgroup, VersionOneIsReadThroughTheMountWhenThePathIsTheHosts) {
  const Folder root;
  root.write("proc/self/cgroup", "4:memory:/docker/xyz\n2:cpu,cpuacct:/docker/xyz\n1:name=x:/\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  const auto limits = cgroup_limits(root.path());
  EXPECT_EQ(limits.cpus, 0.5);
  EXPECT_FALSE(limits.memory_bytes);
}

TEST(Cgroup, NothingToReadIsNoLimit) {
  const auto limits = cgroup_limits(Folder().path());
  EXPECT_FALSE(limits.cpus);
  EXPECT_FALSE(limits.memory_bytes);
}

TEST(Gpus, PeaksAreOfTheWholeName) {
  EXPECT_DOUBLE_EQ(peak_flops("NVIDIA H200", true), 989.4e12);
  EXPECT_DOUBLE_EQ(peak_flops("NVIDIA H100 PCIe", true), 756e12);
  EXPECT_DOUBLE_EQ(peak_flops("NVIDIA H100 80GB HBM3", false), 66.9e12);
  EXPECT_DOUBLE_EQ(peak_flops("NVIDIA A100-SXM4-80GB", true), 312e12);
  for (const char* other : {"NVIDIA L40", "NVIDIA RTX A4000", "NVIDIA A10G", "T400", ""})
    EXPECT_EQ(peak_flops(other, true), 0) << other;
}
