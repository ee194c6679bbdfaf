// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/doctor.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

using namespace yoke;
using namespace yoke::cli;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

int nccl_version(int* version) {
  *version = 22703;
  return 0;
}

topo::Library no_library(const char*) { return {.error = "no such file"}; }

topo::Library nccl_only(const char* file) {
  if (std::string_view(file) != "libnccl.so.2") return no_library(file);
  return {.symbol = [](const char*) { return reinterpret_cast<void*>(nccl_version); }};
}

// A machine that lacks nothing.
Machine healthy() {
  topo::Host host{
      .num_cores = 8,
      .num_cpus = 16,
      .num_usable_cpus = 12,
      .memory_bytes = 64 * kGiB,
      .available_memory_bytes = 32 * kGiB,
      .shm_bytes = 8 * kGiB,
      .free_shm_bytes = 8 * kGiB,
      .gpus = {2, {.name = "H200", .memory_bytes = 140 * kGiB, .free_bytes = 139 * kGiB}},
      .driver = "580.82"};
  host.links = {{.a = {topo::DeviceKind::Cuda, 0},
                 .b = {topo::DeviceKind::Cuda, 1},
                 .kind = topo::LinkKind::NvLink,
                 .bytes_per_second = 450e9}};
  return {.host = host,
          .environment = {{"PATH", "/nowhere:/bin"}},
          .open = nccl_only,
          .torch_version = "2.13.0",
          .torch_has_cuda = true};
}

Finding find(const Machine& machine, const std::string& name) {
  const auto findings = examine(machine);
  const auto found = std::ranges::find(findings, name, &Finding::name);
  EXPECT_NE(found, findings.end()) << name;
  return found == findings.end() ? Finding{} : *found;
}

}  // namespace

TEST(Doctor, CoversEveryPartOfTheMachine) {
  std::vector<std::string> names;
  for (const auto& finding : examine(healthy())) names.push_back(finding.name);
  EXPECT_EQ(names, (std::vector<std::string>{"cpu", "memory", "/dev/shm", "cuda:0", "cuda:1",
                                             "links", "LibTorch", "NCCL", "MPI", "launch"}));
}

TEST(Doctor, DescribesWhatIsThere) {
  EXPECT_EQ(find(healthy(), "cpu").detail, "8 cores, 12 usable CPUs of 16, 1 NUMA node");
  EXPECT_EQ(find(healthy(), "cuda:1").detail, "H200, 139 GiB free of 140 GiB, driver 580.82");
  EXPECT_EQ(find(healthy(), "links").detail, "cuda:0 to cuda:1 by NVLink (450 GB/s)");
  EXPECT_EQ(find(healthy(), "LibTorch").detail, "2.13.0, with CUDA");
  EXPECT_EQ(find(healthy(), "NCCL").detail, "2.27.3");
  EXPECT_EQ(find(healthy(), "launch").detail, "alone: rank 0 of 1, local 0 of 1, node 0 of 1");
}

TEST(Doctor, EverythingThatIsNotOkSaysWhatToDo) {
  Machine poor{.environment = {{"JOB_COMPLETION_INDEX", "1"}}, .open = no_library};
  poor.host.no_gpus = "no NVIDIA driver";
  for (const auto& finding : examine(poor))
    EXPECT_EQ(finding.health == Health::Ok, finding.todo.empty()) << finding.name;
}

TEST(Doctor, MissingGpuIsAWarningWithItsReason) {
  Machine machine = healthy();
  machine.host.gpus.clear();
  machine.host.no_gpus = "no NVIDIA driver";
  EXPECT_EQ(find(machine, "gpu").health, Health::Warn);
  EXPECT_EQ(find(machine, "gpu").detail, "none: no NVIDIA driver");
  machine.open = no_library;
  EXPECT_EQ(find(machine, "NCCL").health, Health::Ok);  // not needed then
}

TEST(Doctor, GpuThatThisProgramCannotUseIsAWarning) {
  Machine machine = healthy();
  machine.torch_has_cuda = false;
  EXPECT_EQ(find(machine, "LibTorch").health, Health::Warn);
  machine.open = no_library;
  EXPECT_EQ(find(machine, "NCCL").health, Health::Warn);
  EXPECT_EQ(find(machine, "NCCL").detail, "not found: no such file");
}

TEST(Doctor, SmallSharedMemoryAndMemoryAreWarnings) {
  Machine machine = healthy();
  machine.host.free_shm_bytes = kGiB / 16;
  machine.host.available_memory_bytes = kGiB;
  EXPECT_EQ(find(machine, "/dev/shm").health, Health::Warn);
  EXPECT_EQ(find(machine, "memory").health, Health::Warn);
}

TEST(Doctor, ProgramsAreLookedForOnThePath) {
  std::string folder = (std::filesystem::temp_directory_path() / "yoke_doctor_XXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  Machine machine = healthy();
  machine.environment["PATH"] = "/nowhere:" + folder;
  EXPECT_EQ(find(machine, "MPI").health, Health::Warn);
  EXPECT_EQ(find(machine, "MPI").detail, "no mpirun on PATH");
  std::ofstream(folder + "/mpirun") << "#!/bin/sh\n";
  std::filesystem::permissions(folder + "/mpirun", std::filesystem::perms::owner_all);
  EXPECT_EQ(find(machine, "MPI").detail, folder + "/mpirun");
  std::filesystem::remove_all(folder);
}

TEST(Doctor, LaunchEnvironmentThatContradictsItselfIsMissingARank) {
  Machine machine = healthy();
  machine.environment["JOB_COMPLETION_INDEX"] = "1";
  const Finding finding = find(machine, "launch");
  EXPECT_EQ(finding.health, Health::Missing);
  EXPECT_NE(finding.detail.find("YOKE_NUM_NODES"), std::string::npos);
}

TEST(Doctor, TextIsAlignedWithTheNextStepBelow) {
  std::ostringstream out;
  print_text(out,
             {{.name = "cpu", .detail = "2 cores"},
              {.name = "gpu", .health = Health::Warn, .detail = "none", .todo = "buy one"},
              {.name = "launch", .health = Health::Missing, .detail = "odd", .todo = "mend it"}});
  EXPECT_EQ(out.str(),
            "ok       cpu       2 cores\n"
            "warn     gpu       none\n"
            "                   -> buy one\n"
            "missing  launch    odd\n"
            "                   -> mend it\n");
}

TEST(Doctor, JsonIsOneObjectALine) {
  std::ostringstream out;
  print_json(out, {{.name = "gpu", .health = Health::Warn, .detail = "say \"no\"", .todo = "x"}});
  EXPECT_EQ(out.str(), R"({"name":"gpu","status":"warn","detail":"say \"no\"","todo":"x"})"
                       "\n");
}

TEST(Doctor, CommandRunsOnThisMachine) {
  CLI::App app("test", "yoke");
  add_doctor(app);
  testing::internal::CaptureStdout();
  try {
    app.parse("doctor --json", false);
  } catch (const CLI::RuntimeError& missing) {
    EXPECT_EQ(missing.get_exit_code(), 1);  // by the environment in which the test runs
  }
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(out.starts_with(R"({"name":"cpu","status":"ok")")) << out;
  EXPECT_NE(out.find(R"({"name":"LibTorch")"), std::string::npos) << out;
}
