// SPDX-License-Identifier: Apache-2.0
// How the tests of data parallelism run ranks: a few steps of a model, and what must fail.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/models_test.h"
#include "yoke/parallel/optimizer.h"

namespace yoke::parallel {

using comm::Communicator;

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void on_ranks(int ranks, const std::function<void(Communicator&)>& fn) {
  comm::run_ranks(ranks, fn,
                  {.world = {.timeout = std::chrono::seconds(30)}, .threads_per_rank = 1});
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
