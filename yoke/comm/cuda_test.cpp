// SPDX-License-Identifier: Apache-2.0
// What only CUDA has: operations issued by autograd's thread, and streams that wait where no host
// does. Over the local backend and over NCCL.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <latch>

#include "yoke/comm/contract_test.h"

using namespace yoke;
using namespace yoke::comm;

namespace {

class CommGpu : public testing::TestWithParam<std::pair<int, bool>> {  // ranks; over NCCL?
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA in this build or host";
    const std::string obstacle = GetParam().second ? nccl_obstacle(size()) : "";
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
  }
  int size() const { return GetParam().first; }
  // All ranks on one GPU, so that they share autograd's thread for it.
  RunOptions options(Duration timeout = 60s) const {
    RunOptions run;
    run.world.timeout = timeout;
    run.devices.assign(size_t(size()), {topo::DeviceKind::Cuda, 0});
    if (GetParam().second) run.backend = nccl_backend({.file = nccl_file()});
    return run;
  }
};

at::Tensor filled(std::vector<int64_t> sizes, double value) {
  return at::full(sizes, value, at::device(at::kCUDA).dtype(at::kFloat));
}

}  // namespace

TEST_P(CommGpu, GradientsAreReducedFromInsideBackward) {
  constexpr int kLayers = 6, kSteps = 20;
  run_ranks(
      size(),
      [&](Communicator& comm) {
        std::vector<at::Tensor> weights;
        for (int i = 0; i < kLayers; ++i)
          weights.push_back(
              (at::eye(64, at::device(at::kCUDA)) * (1 + 0.01 * i)).requires_grad_(true));
        std::vector<Work> works;
        std::vector<at::Tensor> reduced(kLayers);
        for (int i = 0; i < kLayers; ++i)
          weights[size_t(i)].register_hook([&, i](const at::Tensor& gradient) {
            reduced[size_t(i)] = gradient.clone();
            works.push_back(comm.all_reduce(reduced[size_t(i)]));
          });
        for (int step = 0; step < kSteps; ++step) {
          works.clear();
          const at::Tensor input = filled({8, 64}, comm.rank() + 1);
          at::Tensor x = input;
          for (const auto& weight : weights) x = at::matmul(x, weight);
          const auto own = torch::autograd::grad({x.sum()}, weights);
          ASSERT_EQ(works.size(), size_t(kLayers));
          for (const auto& work : works) work.wait();
          // Gradients are linear in the input, which is (rank + 1) times that of rank 0.
          const double factor = size() * (size() + 1) / 2.0 / (comm.rank() + 1);
          for (int i = 0; i < kLayers; ++i)
            ASSERT_TRUE(at::allclose(reduced[size_t(i)], own[size_t(i)] * factor, 1e-5, 1e-5))
                << "layer " << i << " step " << step;
        }
      },
      options());
}

TEST_P(CommGpu, MessagesPassBetweenBackwardPasses) {
  run_ranks(
      size(),
      [&](Communicator& comm) {
        const int next = (comm.rank() + 1) % size(), previous = (comm.rank() + size() - 1) % size();
        at::Tensor weight = filled({32}, comm.rank()).requires_grad_(true);
        at::Tensor inbox = filled({32}, -1);
        std::vector<Work> works;
        weight.register_hook([&](const at::Tensor& gradient) {
          using Direction = Communicator::Message::Direction;
          const at::Tensor outbox = gradient.clone();
          if (!comm.capabilities().messages_overtake)
            return works.push_back(
                comm.group({{Direction::Recv, inbox, previous}, {Direction::Send, outbox, next}}));
          works.push_back(comm.recv(inbox, previous));
          works.push_back(comm.send(outbox, next));
        });
        for (int step = 1; step <= 20; ++step) {
          works.clear();
          torch::autograd::grad({(weight * double(comm.rank() + step)).sum()}, {weight});
          for (const auto& work : works) work.wait();
          ASSERT_TRUE(at::equal(inbox, filled({32}, previous + step)));
        }
      },
      options());
}

TEST_P(CommGpu, AStreamThatWaitsForAnAbsentRankIsReleasedAtTheDeadline) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  std::latch released(size() - 1);
  const Time start = SteadyClock().now();
  try {
    run_ranks(
        size(),
        [&](Communicator& comm) {
          if (comm.rank() == 1) return released.wait();
          const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { released.count_down(); });
          at::Tensor reduced;
          at::Tensor weight = filled({100}, 1).requires_grad_(true);
          weight.register_hook([&](const at::Tensor& gradient) {
            reduced = gradient.clone();
            comm.all_reduce(reduced).wait();  // returns: only the stream waits
          });
          const auto gradients = torch::autograd::grad({(weight * 2).sum()}, {weight});
          gradients[0].add(1).cpu();  // and so does this, until the watchdog lets the stream go
          comm.barrier();
        },
        options(300ms));
    FAIL() << "the run should have failed";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Timeout);
    // Others may be late as well: the copy of the first to come holds up the whole process.
    const std::string what = error.what();
    EXPECT_NE(what.find("rank 1: no operation yet", what.find("not arrived: ")), what.npos) << what;
  }
  EXPECT_LT(SteadyClock().now() - start, 20s);
}

TEST_P(CommGpu, ResultsAreOrderedWithTheCallersStream) {
  run_ranks(
      size(),
      [&](Communicator& comm) {
        // Long kernels before and after: a missing wait on either side would show.
        const at::Tensor noise =
            at::full({2048, 2048}, 0.01, at::device(at::kCUDA).dtype(at::kFloat));
        for (int step = 0; step < 5; ++step) {
          at::Tensor busy = noise;
          for (int i = 0; i < 10; ++i) busy = at::matmul(busy, noise).div_(20.48);
          const at::Tensor tensor = busy.mul(0).add(comm.rank() + step).view({-1});
          comm.all_reduce(tensor).wait();
          const at::Tensor after = tensor.clone();
          ASSERT_TRUE(
              at::equal(after, at::full_like(after, size() * (size() - 1) / 2.0 + size() * step)));
        }
      },
      options());
}

INSTANTIATE_TEST_SUITE_P(Local, CommGpu,
                         testing::Values(std::pair(1, false), std::pair(2, false),
                                         std::pair(4, false)));
INSTANTIATE_TEST_SUITE_P(Nccl, CommGpu,
                         testing::Values(std::pair(1, true), std::pair(2, true),
                                         std::pair(4, true)));
