// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/launch.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "yoke/base/error.h"
#include "yoke/topo/launchers.h"

namespace yoke::topo {
namespace {

using detail::Claim;
using detail::kOverride;

std::string text_of(const Claim& claim) {
  return cat(to_string(claim.info.launcher), " says rank ", claim.info.rank, " of ",
             claim.info.world_size, " (", claim.rank_name, ", ", claim.size_name, ")");
}

void check_range(const Claim& claim) {
  const LaunchInfo& info = claim.info;
  if (info.world_size < 1 || info.rank >= info.world_size)
    fail(Kind::Usage, claim.rank_name, "=", info.rank, " is not below ", claim.size_name, "=",
         info.world_size, "; ", kOverride);
  if (info.local_size &&
      (info.local_rank >= *info.local_size || *info.local_size > info.world_size))
    fail(Kind::Usage, to_string(info.launcher), " says local rank ", info.local_rank, " of ",
         *info.local_size, " in a world of ", info.world_size, ", which cannot be; ", kOverride);
  if (info.node_rank && info.num_nodes && *info.node_rank >= *info.num_nodes)
    fail(Kind::Usage, to_string(info.launcher), " says node ", *info.node_rank, " of ",
         *info.num_nodes, ", which cannot be; ", kOverride);
}

// srun, mpirun or a pod often start another launcher, one on each node.
bool may_have_started(const LaunchInfo& outer, const LaunchInfo& inner) {
  static constexpr std::array kOuter = {Launcher::OpenMpi, Launcher::Slurm, Launcher::Pmi,
                                        Launcher::PyTorchJob, Launcher::KubernetesJob};
  if (std::ranges::find(kOuter, outer.launcher) == kOuter.end()) return false;
  if (outer.world_size == 1) return true;
  // Only torchrun may number the nodes anew.
  if (outer.world_size == inner.num_nodes)
    return inner.launcher == Launcher::Torchrun ||
           outer.rank == inner.node_rank.value_or(outer.rank);
  // mpirun starts its daemons by srun, one on each node but its own.
  return inner.launcher == Launcher::OpenMpi && outer.local_size == 1 &&
         outer.world_size <= inner.world_size;
}

void check_agreement(const Claim& chosen, const Claim& other) {
  if (chosen.info.rank == other.info.rank && chosen.info.world_size == other.info.world_size)
    return;
  if (may_have_started(other.info, chosen.info)) return;
  fail(Kind::Usage, "two launchers disagree: ", text_of(chosen), ", but ", text_of(other),
       "; unset the variables of the one that did not start this process, or ", kOverride);
}

// What follows from the rest, and the user's own meeting place.
void complete(LaunchInfo& info, const detail::Variables& env) {
  if (info.num_nodes == 1) info.local_size = info.world_size;
  if (info.local_size == info.world_size) {
    info.node_rank = 0;
    info.num_nodes = 1;
    if (info.address.empty() && info.world_size > 1) info.address = "127.0.0.1";
  }
  if (env.has("YOKE_ADDRESS")) info.address = env.text("YOKE_ADDRESS");
  if (env.has("YOKE_PORT")) {
    info.port = env.port("YOKE_PORT");
    info.port_from_job = false;
  }
  if (!info.port && !info.address.empty() && !info.job_id.empty()) {
    info.port = detail::port_of(info.job_id);
    info.port_from_job = true;
  }
  info.hub = env.text("YOKE_HUB");
}

}  // namespace

Environment environment_of(const char* const* variables) {
  Environment environment;
  for (; *variables != nullptr; ++variables) {
    const std::string_view text = *variables;
    const size_t equals = text.find('=');
    if (equals != text.npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

LaunchInfo discover(const Environment& environment) {
  const detail::Variables env(environment);
  std::optional<Claim> chosen;
  for (const auto& read : detail::kReaders) {
    const detail::Reading reading = read(env);
    if (!reading) continue;
    if (!reading->problem.empty()) {
      if (!chosen) fail(Kind::Usage, reading->problem);
      continue;
    }
    check_range(*reading);
    if (chosen) {
      check_agreement(*chosen, *reading);
    } else {
      chosen = reading;
      if (chosen->info.launcher == Launcher::Yoke) break;  // the user's word needs no witness
    }
  }
  LaunchInfo info = chosen ? chosen->info : LaunchInfo{.note = detail::alone_note(env)};
  complete(info, env);
  return info;
}

const char* to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::Alone:
      return "alone";
    case Launcher::Yoke:
      return "YOKE_* variables";
    case Launcher::Torchrun:
      return "torchrun";
    case Launcher::OpenMpi:
      return "mpirun (Open MPI)";
    case Launcher::Slurm:
      return "srun";
    case Launcher::Pmi:
      return "mpiexec (PMI)";
    case Launcher::Horovod:
      return "horovodrun";
    case Launcher::DeepSpeed:
      return "deepspeed";
    case Launcher::RankVariables:
      return "RANK variables";
    case Launcher::PyTorchJob:
      return "PyTorchJob";
    case Launcher::KubernetesJob:
      return "Kubernetes Job";
  }
  return "unknown";
}

std::string to_text(const LaunchInfo& info) {
  std::string text = cat(to_string(info.launcher), ": rank ", info.rank, " of ", info.world_size);
  if (info.local_size) text += cat(", local ", info.local_rank, " of ", *info.local_size);
  if (info.node_rank && info.num_nodes)
    text += cat(", node ", *info.node_rank, " of ", *info.num_nodes);
  if (!info.address.empty())
    text += cat(", meets at ", info.address, info.port ? cat(":", *info.port) : "");
  if (info.restart_count > 0) text += cat(", restart ", info.restart_count);
  return text;
}

}  // namespace yoke::topo
