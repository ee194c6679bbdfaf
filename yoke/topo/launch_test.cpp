// SPDX-License-Identifier: Apache-2.0
// One test for each launcher, with the variables it really sets, and one for each trap.
#include "yoke/topo/launch.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::topo;

namespace {

Environment operator+(Environment a, const Environment& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

std::string refusal(const Environment& environment) {
  try {
    return "accepted: " + to_text(discover(environment));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Usage);
    return error.what();
  }
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

// srun -N2 -n3 in job 42: two tasks on n1, one on n2. This is the one on n2.
const Environment kSlurmStep = {{"SLURM_PROCID", "2"},
                                {"SLURM_NTASKS", "3"},
                                {"SLURM_LOCALID", "0"},
                                {"SLURM_NODEID", "1"},
                                {"SLURM_NNODES", "2"},
                                {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                                {"SLURM_JOB_NODELIST", "n[1-2]"},
                                {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"},
                                {"SLURM_JOB_ID", "42"},
                                {"SLURM_STEP_ID", "0"}};

// srun --ntasks-per-node=1 torchrun --nproc_per_node=2, seen by the torchrun worker.
const Environment kTorchrun = {{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "2"},
                               {"GROUP_RANK", "1"},
                               {"GROUP_WORLD_SIZE", "2"},
                               {"MASTER_ADDR", "n1"},
                               {"MASTER_PORT", "41234"},
                               {"TORCHELASTIC_RUN_ID", "run7"},
                               {"TORCHELASTIC_RESTART_COUNT", "1"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

const Environment kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "3"},       {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"OMPI_COMM_WORLD_NODE_RANK", "1"},  {"PMIX_RANK", "3"},
    {"PMIX_NAMESPACE", "1234"}};

}  // namespace

TEST(Launch, EmptyEnvironmentIsAlone) {
  const auto info = discover({{"HOME", "/root"}, {"PATH", "/bin"}});
  EXPECT_EQ(to_text(info), "alone: rank 0 of 1, local 0 of 1, node 0 of 1");
  EXPECT_FALSE(info.port);
  EXPECT_EQ(info.note, "");
}

TEST(Launch, Torchrun) {
  const auto info = discover(kTorchrun);
  EXPECT_EQ(to_text(info),
            "torchrun: rank 3 of 4, local 1 of 2, node 1 of 2, meets at n1:41234, restart 1");
  EXPECT_EQ(info.job_id, "run7");
  EXPECT_TRUE(info.store_is_running);
}

TEST(Launch, Srun) {
  const auto info = discover(kSlurmStep + Environment{{"SLURM_RESTART_COUNT", "2"}});
  EXPECT_EQ(info.launcher, Launcher::Slurm);
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(info.world_size, 3);
  EXPECT_EQ(info.local_rank, 0);
  EXPECT_EQ(info.local_size, 1);
  EXPECT_EQ(info.node_rank, 1);
  EXPECT_EQ(info.num_nodes, 2);
  EXPECT_EQ(info.address, "n1");
  EXPECT_EQ(info.job_id, "42");
  EXPECT_EQ(info.restart_count, 2);
}

TEST(Launch, SrunWithPmixIsStillSrun) {
  const Environment pmix{{"PMIX_RANK", "2"}, {"PMIX_NAMESPACE", "slurm.pmix.42.0"}};
  EXPECT_EQ(discover(kSlurmStep + pmix).launcher, Launcher::Slurm);
}

TEST(Launch, OpenMpi) {
  const auto info = discover(kOpenMpi);
  EXPECT_EQ(to_text(info), "mpirun (Open MPI): rank 3 of 4, local 1 of 2");
  EXPECT_EQ(info.job_id, "1234");
}

TEST(Launch, Hydra) {
  const auto info = discover({{"PMI_RANK", "1"},
                              {"PMI_SIZE", "2"},
                              {"PMI_FD", "9"},
                              {"MPI_LOCALRANKID", "1"},
                              {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(to_text(info),
            "mpiexec (PMI): rank 1 of 2, local 1 of 2, node 0 of 1, meets at 127.0.0.1");
}

TEST(Launch, Horovod) {
  const auto info = discover({{"HOROVOD_RANK", "3"},
                              {"HOROVOD_SIZE", "4"},
                              {"HOROVOD_LOCAL_RANK", "1"},
                              {"HOROVOD_LOCAL_SIZE", "2"},
                              {"HOROVOD_CROSS_RANK", "1"},
                              {"HOROVOD_CROSS_SIZE", "2"},
                              {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.9"},
                              {"HOROVOD_GLOO_RENDEZVOUS_PORT", "5000"}});
  EXPECT_EQ(to_text(info), "horovodrun: rank 3 of 4, local 1 of 2, node 1 of 2");
}

TEST(Launch, DeepSpeed) {
  const auto info = discover({{"RANK", "3"},
                              {"WORLD_SIZE", "4"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_SIZE", "2"},
                              {"CROSS_RANK", "1"},
                              {"CROSS_SIZE", "2"},
                              {"MASTER_ADDR", "n1"},
                              {"MASTER_PORT", "29511"}});
  EXPECT_EQ(to_text(info), "deepspeed: rank 3 of 4, local 1 of 2, node 1 of 2, meets at n1:29511");
}

TEST(Launch, RankVariablesByHand) {
  const auto info = discover({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}});
  EXPECT_EQ(to_text(info), "RANK variables: rank 1 of 2");
  EXPECT_FALSE(info.local_size);
  EXPECT_FALSE(info.port);
}

TEST(Launch, PyTorchJob) {
  const Environment pod = {{"RANK", "1"},
                           {"PET_NODE_RANK", "1"},
                           {"PET_NNODES", "2"},
                           {"MASTER_ADDR", "m-0"},
                           {"MASTER_PORT", "23456"}};
  for (const char* world : {"2", "16"})  // pods, or pods x processes in later versions
    EXPECT_EQ(to_text(discover(pod + Environment{{"WORLD_SIZE", world}})),
              "PyTorchJob: rank 1 of 2, local 0 of 1, node 1 of 2, meets at m-0:23456");
}

TEST(Launch, TrainerV2) {
  const auto info = discover({{"PET_NPROC_PER_NODE", "8"},
                              {"PET_NODE_RANK", "0"},
                              {"PET_NNODES", "2:2"},
                              {"PET_MASTER_ADDR", "tj-node-0-0.tj"},
                              {"PET_MASTER_PORT", "29500"},
                              {"JOB_COMPLETION_INDEX", "0"}});
  EXPECT_EQ(to_text(info),
            "PyTorchJob: rank 0 of 2, local 0 of 1, node 0 of 2, meets at tj-node-0-0.tj:29500");
}

TEST(Launch, KubernetesIndexedJob) {
  const Environment pod = {
      {"JOB_COMPLETION_INDEX", "1"}, {"YOKE_NUM_NODES", "3"}, {"HOSTNAME", "train-1"}};
  const auto bare = discover(pod);
  EXPECT_EQ(to_text(bare), "Kubernetes Job: rank 1 of 3, local 0 of 1, node 1 of 3");
  EXPECT_EQ(bare.job_id, "train");
  EXPECT_TRUE(contains(bare.note, "YOKE_ADDRESS"));
  const auto met = discover(pod + Environment{{"YOKE_ADDRESS", "train-0.train"}});
  EXPECT_EQ(met.address, "train-0.train");
  EXPECT_TRUE(met.port);
  EXPECT_EQ(met.note, "");
}

TEST(Launch, MpiJobWorkerIsAnOpenMpiProcess) {
  const Environment pod = {{"K_MPI_JOB_ROLE", "worker"},
                           {"OMPI_MCA_orte_default_hostfile", "/etc/mpi/hostfile"}};
  EXPECT_EQ(discover(kOpenMpi + pod).launcher, Launcher::OpenMpi);
  EXPECT_EQ(discover(pod).launcher, Launcher::Alone);
}

TEST(Launch, JobSetPodsAreNumberedByTheUser) {
  const auto info = discover({{"JOB_COMPLETION_INDEX", "0"},  // of the child Job, not of the set
                              {"YOKE_RANK", "2"},
                              {"YOKE_WORLD_SIZE", "4"},
                              {"YOKE_ADDRESS", "js-w-0-0.js"},
                              {"YOKE_PORT", "7000"}});
  EXPECT_EQ(to_text(info),
            "YOKE_* variables: rank 2 of 4, local 0 of 1, node 2 of 4, meets at js-w-0-0.js:7000");
}

TEST(Launch, YokeVariablesOverrideEveryLauncher) {
  const auto info = discover(kTorchrun + kSlurmStep +
                             Environment{{"YOKE_RANK", "5"},
                                         {"YOKE_WORLD_SIZE", "6"},
                                         {"YOKE_LOCAL_RANK", "1"},
                                         {"YOKE_LOCAL_SIZE", "2"},
                                         {"YOKE_NODE_RANK", "2"},
                                         {"YOKE_NUM_NODES", "3"}});
  EXPECT_EQ(to_text(info), "YOKE_* variables: rank 5 of 6, local 1 of 2, node 2 of 3");
  EXPECT_EQ(refusal({{"YOKE_RANK", "1"}}),
            "YOKE_RANK and YOKE_WORLD_SIZE go together: set both or neither");
}

TEST(LaunchTrap, BatchScriptWithoutAStepIsAloneAndSaysHowToUseItsTasks) {
  Environment batch = kSlurmStep + Environment{{"SLURM_PROCID", "0"}};
  batch.erase("SLURM_STEP_ID");
  const auto info = discover(batch);
  EXPECT_EQ(info.launcher, Launcher::Alone);
  EXPECT_EQ(info.world_size, 1);
  EXPECT_TRUE(contains(info.note, "Slurm job 42 has 3 tasks")) << info.note;
  EXPECT_TRUE(contains(info.note, "write srun before the command")) << info.note;
}

TEST(LaunchTrap, ShellOfAnInteractiveAllocationIsNoTask) {
  for (const char* step : {"4294967291", "4294967290"})
    EXPECT_EQ(discover(kSlurmStep + Environment{{"SLURM_STEP_ID", step}}).launcher,
              Launcher::Alone);
}

TEST(LaunchTrap, StepOfFewerTasksThanTheJobCountsItsOwn) {
  const auto info = discover(kSlurmStep + Environment{{"SLURM_NTASKS", "8"},
                                                      {"SLURM_STEP_NUM_TASKS", "3"},
                                                      {"SLURM_STEP_NODELIST", "n[2-3]"}});
  EXPECT_EQ(info.world_size, 3);
  EXPECT_EQ(info.address, "n2");
}

TEST(LaunchTrap, OpenMpiNodeRankIsNotTheRankOfTheNode) {
  const auto info = discover(kOpenMpi);
  EXPECT_FALSE(info.node_rank);
  EXPECT_FALSE(info.num_nodes);
}

TEST(LaunchTrap, PodRankWithoutALocalRankIsNotAProcessRank) {
  EXPECT_EQ(
      refusal({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "m-0"}}),
      "RANK=1 and WORLD_SIZE=2 come without LOCAL_RANK and may number pods, not processes: set "
      "LOCAL_RANK=0 if each pod or node runs one process, or start the program with torchrun");
  EXPECT_EQ(discover({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).launcher, Launcher::Alone);
  EXPECT_TRUE(contains(refusal({{"RANK", "1"}, {"PET_NODE_RANK", "0"}, {"PET_NNODES", "2"}}),
                       "PET_NODE_RANK=0 but RANK=1"));
}

TEST(LaunchTrap, ElasticNodeCountIsRefusedUnlessTorchrunDecidedIt) {
  const Environment elastic = {{"PET_NODE_RANK", "1"}, {"PET_NNODES", "1:4"}};
  EXPECT_TRUE(contains(refusal(elastic), "PET_NNODES='1:4' leaves the number of nodes open"));
  EXPECT_EQ(discover(kTorchrun + elastic).launcher, Launcher::Torchrun);
}

TEST(LaunchTrap, CompletionIndexWithoutAWorldSizeIsRefused) {
  EXPECT_EQ(
      refusal({{"JOB_COMPLETION_INDEX", "1"}}),
      "JOB_COMPLETION_INDEX=1 comes without the number of pods: set YOKE_NUM_NODES to the "
      "Job's .spec.completions, or YOKE_RANK=0 and YOKE_WORLD_SIZE=1 if each pod works alone");
  EXPECT_EQ(discover(kTorchrun + Environment{{"JOB_COMPLETION_INDEX", "1"}}).launcher,
            Launcher::Torchrun);
}

TEST(LaunchTrap, PmixRankWithoutASizeIsRefused) {
  for (const char* name : {"PMIX_RANK", "PMI_RANK"}) {
    const auto text = refusal({{name, "3"}, {"PMIX_NAMESPACE", "x"}});
    EXPECT_TRUE(contains(text, cat(name, "=3 comes without the number of processes"))) << text;
    EXPECT_TRUE(contains(text, "set YOKE_RANK and YOKE_WORLD_SIZE")) << text;
  }
}

TEST(LaunchTrap, TwoLaunchersThatDisagreeAreNamedWithTheirNumbers) {
  const Environment exported = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}};
  EXPECT_EQ(
      refusal(kSlurmStep + exported),
      "two launchers disagree: srun says rank 2 of 3 (SLURM_PROCID, SLURM_NTASKS), but RANK "
      "variables says rank 0 of 2 (RANK, WORLD_SIZE); unset the variables of the one that did "
      "not start this process, or set YOKE_RANK and YOKE_WORLD_SIZE to say which process this "
      "is");
  EXPECT_TRUE(contains(refusal(kOpenMpi + exported), "two launchers disagree"));
}

TEST(LaunchTrap, LaunchersThatAgreeAreNoConflict) {
  const Environment same = {{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "0"}};
  EXPECT_EQ(discover(kSlurmStep + same).launcher, Launcher::Slurm);
}

TEST(LaunchTrap, TorchrunStartedBySrunOnEachNodeIsTorchrun) {
  // The agents' own numbers: two tasks, one a node; torchrun may number the nodes otherwise.
  const Environment agents = kSlurmStep + Environment{{"SLURM_PROCID", "0"},
                                                      {"SLURM_NODEID", "0"},
                                                      {"SLURM_NTASKS", "2"},
                                                      {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
  EXPECT_EQ(discover(kTorchrun + agents).launcher, Launcher::Torchrun);
  EXPECT_TRUE(contains(refusal(kTorchrun + kSlurmStep), "torchrun says rank 3 of 4"));
}

TEST(LaunchTrap, MpirunWhoseDaemonsSrunStartedIsMpirun) {
  // Three nodes: mpirun serves its own and starts two daemons by srun.
  const Environment daemon = kSlurmStep + Environment{{"SLURM_PROCID", "1"},
                                                      {"SLURM_NTASKS", "2"},
                                                      {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
  EXPECT_EQ(discover(kOpenMpi + daemon).rank, 3);
  EXPECT_TRUE(contains(refusal(kOpenMpi + kSlurmStep + Environment{{"SLURM_NTASKS", "8"}}),
                       "srun says rank 2 of 8"));
}

TEST(LaunchTrap, PortComesFromTheJobAndNeverFromAHabit) {
  const auto port = [](Environment more) { return discover(kSlurmStep + more).port.value_or(0); };
  const int first = port({});
  EXPECT_EQ(first, port({{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}));  // equal on every rank
  EXPECT_NE(first, port({{"SLURM_JOB_ID", "43"}}));
  EXPECT_NE(first, port({{"SLURM_STEP_ID", "1"}}));
  for (int job = 1; job < 3000; ++job) {
    const int value = port({{"SLURM_JOB_ID", std::to_string(job)}});
    ASSERT_TRUE(value >= 10000 && value < 29000) << value;
  }
}

TEST(LaunchTrap, NumbersThatCannotBeAreRefusedByName) {
  EXPECT_TRUE(contains(refusal(kSlurmStep + Environment{{"SLURM_PROCID", "3"}}),
                       "SLURM_PROCID=3 is not below SLURM_NTASKS=3"));
  EXPECT_TRUE(contains(refusal(kTorchrun + Environment{{"RANK", "abc"}}), "RANK='abc' is not"));
  EXPECT_TRUE(contains(refusal(kTorchrun + Environment{{"RANK", "-1"}}), "RANK='-1' is not"));
  EXPECT_TRUE(contains(refusal(kTorchrun + Environment{{"WORLD_SIZE", "0"}}), "WORLD_SIZE=0"));
  EXPECT_TRUE(contains(refusal(kTorchrun + Environment{{"LOCAL_RANK", "2"}}), "local rank 2 of 2"));
  EXPECT_TRUE(contains(refusal(kTorchrun + Environment{{"GROUP_RANK", "2"}}), "node 2 of 2"));
  EXPECT_TRUE(contains(refusal(kTorchrun + Environment{{"MASTER_PORT", "70000"}}),
                       "MASTER_PORT=70000 is not a port"));
}
