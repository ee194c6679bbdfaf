// SPDX-License-Identifier: Apache-2.0
// Who started this process and which one of how many it is, from the environment alone. One
// launcher may have started another (srun one torchrun on each node): the innermost is believed.
// Two that contradict each other are refused, with the numbers of both; nothing is guessed.
//
// A user overrides it all with YOKE_RANK and YOKE_WORLD_SIZE, which mean one process a node unless
// YOKE_LOCAL_RANK is there too (and YOKE_LOCAL_SIZE, YOKE_NODE_RANK, YOKE_NUM_NODES, YOKE_JOB_ID).
// YOKE_ADDRESS and YOKE_PORT set the meeting place under every launcher; YOKE_HUB names one that
// runs.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace yoke::topo {

using Environment = std::map<std::string, std::string>;

enum class Launcher {
  Alone,
  Yoke,  // the YOKE_* variables
  Torchrun,
  OpenMpi,
  Slurm,
  Pmi,  // MPICH's Hydra, Intel MPI
  Horovod,
  DeepSpeed,
  RankVariables,  // RANK, WORLD_SIZE and LOCAL_RANK, set by hand or by another launcher
  PyTorchJob,     // Kubeflow's PET_* variables: one process for each pod
  KubernetesJob,  // an Indexed Job: one process for each pod
};

struct LaunchInfo {
  Launcher launcher = Launcher::Alone;
  int rank = 0;  // of the process
  int world_size = 1;
  int local_rank = 0;                 // among the processes of the node
  std::optional<int> local_size = 1;  // these three: nothing where the launcher does not tell
  std::optional<int> node_rank = 0;
  std::optional<int> num_nodes = 1;
  std::string address = {};       // host of rank 0; empty: meet through MPI, or alone
  std::optional<int> port = {};   // nothing: rank 0 binds port 0 and publishes what it got
  bool port_from_job = false;     // the port is made from job_id, and may turn out to be taken
  bool store_is_running = false;  // torchrun's own store listens there; nobody may bind it
  std::string hub = {};           // "host:port" where the processes meet, if it runs already
  std::string job_id = {};        // the same for all processes of the job, empty if unknown
  int restart_count = 0;
  std::string note = {};  // what the user may want to know, or empty
};

// From the list that main() gets ("NAME=value"), which ends with a null.
Environment environment_of(const char* const* variables);

// Pure. Throws Kind::Usage, naming the variables.
LaunchInfo discover(const Environment& environment);

const char* to_string(Launcher launcher);     // "torchrun", "srun"
std::string to_text(const LaunchInfo& info);  // "srun: rank 1 of 4, local 1 of 2, node 0 of 2, …"

}  // namespace yoke::topo
