// SPDX-License-Identifier: Apache-2.0
// How the tests of data parallelism run ranks. As they are: threads on the CPU. The environment
// puts the same tests elsewhere: YOKE_TEST_DEVICE=cuda onto a GPU that all ranks share,
// YOKE_TEST_BACKEND=nccl over NCCL, YOKE_TEST_SIZES=2,4 with other numbers of ranks; and started by
// a launcher as several processes, they form one world for each on_ranks() of its size.
#pragma once

#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "yoke/base/text.h"
#include "yoke/comm/nccl/backend.h"
#include "yoke/comm/run_world.h"
#include "yoke/comm/shm/backend.h"
#include "yoke/parallel/models_test.h"
#include "yoke/parallel/optimizer.h"

namespace yoke::parallel {

using comm::Communicator;

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

inline bool over_nccl() { return setting("YOKE_TEST_BACKEND") == "nccl"; }
inline const topo::LaunchInfo& test_launch() {
  static const auto launch = topo::discover(topo::environment_of(environ));
  return launch;
}

// The numbers of ranks to be tried.
inline std::vector<int> sizes() {
  if (test_launch().world_size > 1) return {test_launch().world_size};
  if (setting("YOKE_TEST_SIZES").empty()) return {1, 2, 3, 4};
  std::vector<int> result;
  for (const auto& size : split(setting("YOKE_TEST_SIZES"), ',')) result.push_back(std::stoi(size));
  return result;
}
inline bool tries(int ranks) {
  const auto tried = sizes();
  return std::ranges::find(tried, ranks) != tried.end();
}

inline void on_ranks(int ranks, const std::function<void(Communicator&)>& fn) {
  comm::RunOptions run{.world = {.timeout = std::chrono::seconds(60)}, .threads_per_rank = 1};
  const auto launch = test_launch();
  const bool launched = launch.world_size > 1 && launch.world_size == ranks;
  if (over_nccl()) run.backend = comm::nccl_backend({.file = setting("YOKE_TEST_NCCL")});
  if (launched && !over_nccl()) run.backend = comm::shm_backend();
  at::globalContext().setSDPUseCuDNN(false);  // several ranks do without: so one must, too
  if (test_device().is_cuda())
    run.devices.assign(size_t(launched ? 1 : ranks), {topo::DeviceKind::Cuda, 0});
  if (!launched) return comm::run_ranks(ranks, fn, run);
  static int num_worlds = 0;
  auto named = launch;  // processes that are in the same test meet
  named.job_id = cat(testing::UnitTest::GetInstance()->current_test_info()->name(), num_worlds++);
  comm::run_world(named, fn, {.run = run, .ranks = 1, .meet_timeout = std::chrono::seconds(60)});
}

inline std::string failure_of(int ranks, const std::function<void(Communicator&)>& fn) {
  try {
    on_ranks(ranks, fn);
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "it should have failed";
  return "";
}

// Several steps of a model; gives the losses of the whole batch.
inline std::vector<double> train(Communicator& comm, TestModel& model, DataParallel& dp,
                                 Optimizer& optimizer, int steps = 4, int64_t batch = 12) {
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const int64_t begin = batch * comm.rank() / comm.size(),
                  end = batch * (comm.rank() + 1) / comm.size();
    const at::Tensor loss = model.loss_sum(step, begin, end);
    dp.backward(loss, double(end - begin));
    optimizer.step();
    const at::Tensor total = loss.detach().to(at::kDouble);
    comm.all_reduce(total).wait();
    losses.push_back(total.item<double>() / double(batch));
  }
  return losses;
}

inline std::vector<double> losses_of(int ranks, const std::string& name, at::ScalarType dtype,
                                     const DataParallelOptions& options, int steps = 4) {
  std::vector<double> losses;
  on_ranks(ranks, [&](Communicator& comm) {
    const auto model = make_model(name, dtype);
    DataParallel dp(*model, comm, options);
    AdamW optimizer(dp, {{.lr = 0.01, .clip = 1}});
    const auto mine = train(comm, *model, dp, optimizer, steps);
    if (comm.rank() == 0) losses = mine;
  });
  return losses;
}

}  // namespace yoke::parallel
