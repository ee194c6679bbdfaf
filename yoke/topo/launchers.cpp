// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/launchers.h"

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/topo/slurm_text.h"

namespace yoke::topo::detail {
namespace {

Claim claim(const Variables& env, Launcher launcher, const char* rank, const char* size) {
  return {.info = {.launcher = launcher,
                   .rank = env.number(rank).value_or(0),
                   .world_size = env.number(size).value_or(1),
                   .local_size = std::nullopt,
                   .node_rank = std::nullopt,
                   .num_nodes = std::nullopt},
          .rank_name = rank,
          .size_name = size};
}

void one_process_a_node(LaunchInfo& info) {
  info.local_rank = 0;
  info.local_size = 1;
  info.node_rank = info.rank;
  info.num_nodes = info.world_size;
}

Reading from_yoke(const Variables& env) {
  if (!env.has("YOKE_RANK") && !env.has("YOKE_WORLD_SIZE")) return std::nullopt;
  if (!env.has("YOKE_RANK") || !env.has("YOKE_WORLD_SIZE"))
    return Claim{.problem = "YOKE_RANK and YOKE_WORLD_SIZE go together: set both or neither"};
  Claim result = claim(env, Launcher::Yoke, "YOKE_RANK", "YOKE_WORLD_SIZE");
  LaunchInfo& info = result.info;
  if (env.has("YOKE_LOCAL_RANK")) {
    info.local_rank = *env.number("YOKE_LOCAL_RANK");
    info.local_size = env.number("YOKE_LOCAL_SIZE");
    info.node_rank = env.number("YOKE_NODE_RANK");
    info.num_nodes = env.number("YOKE_NUM_NODES");
  } else {
    one_process_a_node(info);
  }
  info.job_id = env.text("YOKE_JOB_ID");
  return result;
}

// RANK and its company: torchrun, DeepSpeed, or whoever sets the same names.
Claim from_rank_variables(const Variables& env, Launcher launcher) {
  Claim result = claim(env, launcher, "RANK", "WORLD_SIZE");
  LaunchInfo& info = result.info;
  info.local_rank = env.number("LOCAL_RANK").value_or(0);
  info.local_size = env.either("LOCAL_WORLD_SIZE", "LOCAL_SIZE");
  info.node_rank = env.either("GROUP_RANK", "CROSS_RANK");
  info.num_nodes = env.either("GROUP_WORLD_SIZE", "CROSS_SIZE");
  info.address = env.text("MASTER_ADDR");
  info.port = env.port("MASTER_PORT");
  return result;
}

Reading from_torchrun(const Variables& env) {
  if (!env.has("TORCHELASTIC_RUN_ID") || !env.has("RANK") || !env.has("WORLD_SIZE"))
    return std::nullopt;
  Claim result = from_rank_variables(env, Launcher::Torchrun);
  const std::string id = env.text("TORCHELASTIC_RUN_ID");
  result.info.job_id = id == "none" ? "" : id;  // torchrun's default, the same for every job
  result.info.restart_count = env.number("TORCHELASTIC_RESTART_COUNT").value_or(0);
  result.info.store_is_running = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return result;
}

Reading from_open_mpi(const Variables& env) {
  if (!env.has("OMPI_COMM_WORLD_RANK") || !env.has("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  Claim result = claim(env, Launcher::OpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  result.info.local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK").value_or(0);
  result.info.local_size = env.number("OMPI_COMM_WORLD_LOCAL_SIZE");
  // OMPI_COMM_WORLD_NODE_RANK is this process's rank on its node, not the node's rank.
  result.info.job_id = env.text("PMIX_NAMESPACE");
  return result;
}

// A batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS though it is one process: only a
// step numbers its tasks. Step ids at the top of 32 bits are the batch and interactive shells.
bool in_slurm_step(const Variables& env) {
  const auto step = parse_int(env.text("SLURM_STEP_ID"));
  return step && *step < 0xfffffff0 && env.has("SLURM_PROCID");
}

Reading from_slurm(const Variables& env) {
  if (!in_slurm_step(env)) return std::nullopt;
  const bool step_size = env.has("SLURM_STEP_NUM_TASKS");
  Claim result = claim(env, Launcher::Slurm, "SLURM_PROCID",
                       step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
  LaunchInfo& info = result.info;
  info.local_rank = env.number("SLURM_LOCALID").value_or(0);
  info.node_rank = env.number("SLURM_NODEID");
  info.num_nodes = env.either("SLURM_STEP_NUM_NODES", "SLURM_NNODES");
  if (env.has("SLURM_STEP_TASKS_PER_NODE") && info.node_rank) {
    const auto tasks = expand_tasks_per_node(env.text("SLURM_STEP_TASKS_PER_NODE"));
    if (size_t(*info.node_rank) < tasks.size()) info.local_size = tasks[size_t(*info.node_rank)];
  }
  // The step's own nodes where they are given: task 0 runs on the first. SLURM_LAUNCH_NODE_IPADDR
  // is the machine where srun was typed.
  const std::string nodes =
      env.text(env.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST");
  if (!nodes.empty()) info.address = expand_nodelist(nodes).front();
  info.job_id = env.text("SLURM_JOB_ID");
  if (!info.job_id.empty()) {
    info.port = port_of(cat(info.job_id, ".", env.text("SLURM_STEP_ID")));
    info.port_from_job = true;
  }
  info.restart_count = env.number("SLURM_RESTART_COUNT").value_or(0);
  return result;
}

Reading from_pmi(const Variables& env) {
  if (env.has("PMI_RANK") && env.has("PMI_SIZE")) {
    Claim result = claim(env, Launcher::Pmi, "PMI_RANK", "PMI_SIZE");
    result.info.local_rank = env.number("MPI_LOCALRANKID").value_or(0);
    result.info.local_size = env.number("MPI_LOCALNRANKS");
    return result;
  }
  for (const char* name : {"PMIX_RANK", "PMI_RANK"})
    if (env.has(name))
      return Claim{.problem =
                       cat(name, "=", env.text(name),
                           " comes without the number of processes, which only MPI can ask for; ",
                           kOverride, ", or start with mpirun or srun")};
  return std::nullopt;
}

Reading from_horovod(const Variables& env) {
  if (!env.has("HOROVOD_RANK") || !env.has("HOROVOD_SIZE")) return std::nullopt;
  Claim result = claim(env, Launcher::Horovod, "HOROVOD_RANK", "HOROVOD_SIZE");
  result.info.local_rank = env.number("HOROVOD_LOCAL_RANK").value_or(0);
  result.info.local_size = env.number("HOROVOD_LOCAL_SIZE");
  result.info.node_rank = env.number("HOROVOD_CROSS_RANK");
  result.info.num_nodes = env.number("HOROVOD_CROSS_SIZE");
  // HOROVOD_GLOO_RENDEZVOUS_ADDR is Horovod's own server beside the launcher, not rank 0.
  return result;
}

Reading from_rank_and_local_rank(const Variables& env) {
  if (!env.has("RANK") || !env.has("WORLD_SIZE") || !env.has("LOCAL_RANK")) return std::nullopt;
  const bool deepspeed = env.has("LOCAL_SIZE") && env.has("CROSS_RANK");
  Claim result =
      from_rank_variables(env, deepspeed ? Launcher::DeepSpeed : Launcher::RankVariables);
  result.info.job_id = env.text("ELASTIC_RUN_ID");
  return result;
}

// "2", or "2:2"; nothing for a range that leaves the number open.
std::optional<int> fixed_nodes(const std::string& text) {
  const auto bounds = split(text, ':');
  const auto low = parse_int(bounds.front()), high = parse_int(bounds.back());
  if (bounds.size() > 2 || !low || low != high || *low < 1 || *low > 1'000'000) return std::nullopt;
  return int(*low);
}

Reading from_pytorch_job(const Variables& env) {
  if (!env.has("PET_NODE_RANK") || !env.has("PET_NNODES")) return std::nullopt;
  const auto nodes = fixed_nodes(env.text("PET_NNODES"));
  if (!nodes)
    return Claim{.problem = cat("PET_NNODES='", env.text("PET_NNODES"),
                                "' leaves the number of nodes open; give one number, or start the "
                                "program with torchrun")};
  // RANK is the pod's too here and must not differ; WORLD_SIZE counts pods in some versions and
  // processes in others, and tells nothing.
  if (env.has("RANK") && !env.has("LOCAL_RANK") &&
      env.number("RANK") != env.number("PET_NODE_RANK"))
    return Claim{.problem = cat("PET_NODE_RANK=", env.text("PET_NODE_RANK"), " but RANK=",
                                env.text("RANK"), ", and both number this pod; ", kOverride)};
  Claim result = claim(env, Launcher::PyTorchJob, "PET_NODE_RANK", "");
  result.size_name = "PET_NNODES";
  result.info.world_size = *nodes;
  one_process_a_node(result.info);
  const bool own = env.has("PET_MASTER_ADDR");
  result.info.address = env.text(own ? "PET_MASTER_ADDR" : "MASTER_ADDR");
  result.info.port = env.port(own ? "PET_MASTER_PORT" : "MASTER_PORT");
  result.info.job_id = env.text("PET_RDZV_ID");
  return result;
}

Reading from_kubernetes_job(const Variables& env) {
  if (!env.has("JOB_COMPLETION_INDEX")) return std::nullopt;
  if (!env.has("YOKE_NUM_NODES"))
    return Claim{.problem =
                     cat("JOB_COMPLETION_INDEX=", env.text("JOB_COMPLETION_INDEX"),
                         " comes without the number of pods: set YOKE_NUM_NODES to the Job's "
                         ".spec.completions, or YOKE_RANK=0 and YOKE_WORLD_SIZE=1 if each pod "
                         "works alone")};
  Claim result = claim(env, Launcher::KubernetesJob, "JOB_COMPLETION_INDEX", "YOKE_NUM_NODES");
  one_process_a_node(result.info);
  // The pod's host name is <job>-<index>.
  const std::string host = env.text("HOSTNAME"), suffix = "-" + env.text("JOB_COMPLETION_INDEX");
  if (host.ends_with(suffix)) result.info.job_id = host.substr(0, host.size() - suffix.size());
  if (result.info.world_size > 1 && !env.has("YOKE_ADDRESS"))
    result.info.note =
        "set YOKE_ADDRESS to <job>-0.<headless service>: Kubernetes does not tell it";
  return result;
}

// An older PyTorchJob numbers its pods with RANK; a process has a LOCAL_RANK as well.
Reading from_pod_rank(const Variables& env) {
  if (!env.has("RANK") || env.number("WORLD_SIZE").value_or(1) == 1) return std::nullopt;
  return Claim{.problem = cat("RANK=", env.text("RANK"), " and WORLD_SIZE=", env.text("WORLD_SIZE"),
                              " come without LOCAL_RANK and may number pods, not processes: set "
                              "LOCAL_RANK=0 if each pod or node runs one process, or start the "
                              "program with torchrun")};
}

}  // namespace

const std::array<Reading (*)(const Variables&), 10> kReaders = {from_yoke,
                                                                from_torchrun,
                                                                from_open_mpi,
                                                                from_slurm,
                                                                from_pmi,
                                                                from_horovod,
                                                                from_rank_and_local_rank,
                                                                from_pytorch_job,
                                                                from_kubernetes_job,
                                                                from_pod_rank};

std::string Variables::text(const char* name) const {
  const auto found = environment_.find(name);
  return found == environment_.end() ? "" : found->second;
}

std::optional<int> Variables::number(const char* name) const {
  if (!has(name)) return std::nullopt;
  const auto value = parse_int(text(name));
  if (!value || *value < 0 || *value > 1'000'000'000)
    fail(Kind::Usage, name, "='", text(name),
         "' is not a whole number of at least 0; unset it, or ", kOverride);
  return int(*value);
}

std::optional<int> Variables::port(const char* name) const {
  const auto value = number(name);
  if (value && (*value < 1 || *value > 65535))
    fail(Kind::Usage, name, "=", *value, " is not a port; wanted 1 to 65535");
  return value;
}

std::string alone_note(const Variables& env) {
  const int tasks = env.number("SLURM_NTASKS").value_or(1);
  if (tasks == 1) return "";
  return cat("Slurm job ", env.text("SLURM_JOB_ID"), " has ", tasks,
             " tasks, but this process was not started by srun and works alone; write srun before "
             "the command to use them");
}

int port_of(std::string_view job) {
  uint32_t hash = 2166136261u;
  for (const char c : job) hash = (hash ^ uint8_t(c)) * 16777619u;
  return int(10000 + hash % 19000);
}

}  // namespace yoke::topo::detail
