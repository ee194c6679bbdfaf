// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/doctor.h"

#include <dlfcn.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>
#include <memory>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

const char* to_string(Health health) {
  switch (health) {
    case Health::Ok:
      return "ok";
    case Health::Warn:
      return "warn";
    case Health::Missing:
      return "missing";
  }
  return "unknown";
}

std::string counted(int64_t count, const char* noun) {
  return cat(count, " ", noun, count == 1 ? "" : "s");
}

Finding check_cpu(const topo::Host& host) {
  Finding finding{.name = "cpu"};
  finding.detail =
      cat(counted(host.num_cores, "core"), ", ", counted(host.num_usable_cpus, "usable CPU"),
          " of ", host.num_cpus, ", ", counted(host.num_numa_nodes, "NUMA node"));
  return finding;
}

Finding check_memory(const topo::Host& host) {
  Finding finding{.name = "memory"};
  finding.detail =
      cat(bytes_text(host.available_memory_bytes), " available of ", bytes_text(host.memory_bytes));
  if (host.available_memory_bytes < 2 * kGiB) {
    finding.health = Health::Warn;
    finding.todo =
        "training wants 2 GiB or more: end other programs, or raise the container's limit";
  }
  return finding;
}

Finding check_shm(const topo::Host& host) {
  Finding finding{.name = "/dev/shm"};
  finding.detail = cat(bytes_text(host.free_shm_bytes), " free of ", bytes_text(host.shm_bytes));
  if (host.free_shm_bytes < kGiB) {
    finding.health = Health::Warn;
    finding.todo =
        "ranks in several processes exchange tensors here: start the container with --shm-size=8g, "
        "or "
        "run the ranks in one process";
  }
  return finding;
}

std::string describe(const topo::Link& link) {
  std::string text =
      cat(topo::to_text(link.a), " to ", topo::to_text(link.b), " by ", topo::to_string(link.kind));
  if (link.bytes_per_second > 0)
    text += cat(" (", std::lround(link.bytes_per_second / 1e9), " GB/s)");
  return text;
}

void add_gpus(const topo::Host& host, std::vector<Finding>& findings) {
  if (host.gpus.empty()) {
    findings.push_back({.name = "gpu",
                        .health = Health::Warn,
                        .detail = cat("none: ", host.no_gpus),
                        .todo = host.driver.empty()
                                    ? "CPU ranks (cpu:N) work; for GPUs install the NVIDIA driver"
                                    : "CPU ranks (cpu:N) work; see nvidia-smi and "
                                      "CUDA_VISIBLE_DEVICES"});
    return;
  }
  for (size_t i = 0; i < host.gpus.size(); ++i) {
    const auto& gpu = host.gpus[i];
    findings.push_back({.name = cat("cuda:", i),
                        .detail = cat(gpu.name, ", ", bytes_text(gpu.free_bytes), " free of ",
                                      bytes_text(gpu.memory_bytes), ", driver ", host.driver)});
  }
  std::vector<std::string> links;
  for (const auto& link : host.links) links.push_back(describe(link));
  if (!links.empty()) findings.push_back({.name = "links", .detail = join(links, ", ")});
  if (!host.no_gpus.empty())
    findings.push_back({.name = "gpu",
                        .health = Health::Warn,
                        .detail = host.no_gpus,
                        .todo = "see nvidia-smi and CUDA_VISIBLE_DEVICES for the rest"});
}

Finding check_torch(const Machine& machine) {
  Finding finding{.name = "LibTorch"};
  finding.detail =
      cat(machine.torch_version, machine.torch_has_cuda ? ", with CUDA" : ", CPU only");
  if (!machine.torch_has_cuda && !machine.host.gpus.empty()) {
    finding.health = Health::Warn;
    finding.todo = "this program cannot use the GPUs: build it with the cuda preset";
  }
  return finding;
}

Finding check_nccl(const Machine& machine) {
  Finding finding{.name = "NCCL"};
  const topo::Library library = machine.open("libnccl.so.2");
  int version = 0;
  const auto get_version = library.function<int(int*)>("ncclGetVersion");
  if (get_version != nullptr && get_version(&version) == 0) {
    finding.detail = cat(version / 10000, ".", version / 100 % 100, ".", version % 100);
  } else if (machine.host.gpus.empty()) {
    finding.detail = "not found, and not needed without a GPU";
  } else {
    finding.health = Health::Warn;
    finding.detail =
        cat("not found: ", library ? "libnccl.so.2 has no ncclGetVersion" : library.error);
    finding.todo =
        "GPUs in several processes need it: install libnccl2, or add the folder of libnccl.so.2 to "
        "LD_LIBRARY_PATH";
  }
  return finding;
}

std::string find_program(const topo::Environment& environment, const std::string& name) {
  const auto path = environment.find("PATH");
  if (path == environment.end()) return "";
  for (const auto& folder : split(path->second, ':'))
    if (const std::string file = folder + "/" + name; ::access(file.c_str(), X_OK) == 0)
      return file;
  return "";
}

Finding check_mpi(const Machine& machine) {
  const std::string mpirun = find_program(machine.environment, "mpirun");
  if (!mpirun.empty()) return {.name = "MPI", .detail = mpirun};
  return {.name = "MPI",
          .health = Health::Warn,
          .detail = "no mpirun on PATH",
          .todo = "needed only for the mpi backend: install openmpi-bin and libopenmpi-dev"};
}

Finding check_launch(const topo::Environment& environment) {
  try {
    const auto info = topo::discover(environment);
    return {.name = "launch",
            .health = info.note.empty() ? Health::Ok : Health::Warn,
            .detail = topo::to_text(info),
            .todo = info.note};
  } catch (const Error& error) {
    return {.name = "launch",
            .health = Health::Missing,
            .detail = error.what(),
            .todo = "mend the variables it names, or set YOKE_RANK and YOKE_WORLD_SIZE"};
  }
}

Machine read_machine() {
  Machine machine{.environment = read_environment(), .torch_version = TORCH_VERSION};
  machine.host = read_visible_host(machine.environment);
  // Loaded with this program or not at all.
  if (void* cuda = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) {
    machine.torch_has_cuda = true;
    ::dlclose(cuda);
  }
  return machine;
}

}  // namespace

std::vector<Finding> examine(const Machine& machine) {
  std::vector<Finding> findings{check_cpu(machine.host), check_memory(machine.host),
                                check_shm(machine.host)};
  add_gpus(machine.host, findings);
  findings.push_back(check_torch(machine));
  findings.push_back(check_nccl(machine));
  findings.push_back(check_mpi(machine));
  findings.push_back(check_launch(machine.environment));
  return findings;
}

void print_text(std::ostream& out, const std::vector<Finding>& findings) {
  const auto padded = [](std::string text, size_t width) {
    text.resize(std::max(width, text.size()), ' ');
    return text;
  };
  for (const auto& finding : findings) {
    out << padded(to_string(finding.health), 9) << padded(finding.name, 10) << finding.detail
        << "\n";
    if (!finding.todo.empty()) out << std::string(19, ' ') << "-> " << finding.todo << "\n";
  }
}

void print_json(std::ostream& out, const std::vector<Finding>& findings) {
  observe::JsonLines lines(out);
  for (const auto& finding : findings)
    lines.write({{"name", finding.name},
                 {"status", to_string(finding.health)},
                 {"detail", finding.detail},
                 {"todo", finding.todo}});
}

void add_doctor(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  CLI::App* doctor =
      app.add_subcommand("doctor", "What this machine has, what is missing, and how to get it");
  doctor->add_flag("--json", *json, "One JSON object a line: name, status, detail, todo");
  doctor->callback([json] {
    const auto findings = examine(read_machine());
    (*json ? print_json : print_text)(std::cout, findings);
    for (const auto& finding : findings)
      if (finding.health == Health::Missing) throw CLI::RuntimeError(1);
  });
}

}  // namespace yoke::cli
