// SPDX-License-Identifier: Apache-2.0
// The same weights and data as PyTorch's DDP and FSDP2 give the same losses. What they gave comes
// from tests/pytorch_reference.py; tests/pytorch_test.sh runs both.
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/optimizer.h"

namespace yoke::parallel {
namespace {

// The numbers of one list in the script's line.
std::vector<double> numbers(const std::string& line, const std::string& name) {
  const std::string mark = cat("\"", name, "\": [");
  const size_t begin = line.find(mark);
  if (begin == std::string::npos) fail(Kind::Internal, "no ", name, " in ", line);
  const size_t first = begin + mark.size();
  std::vector<double> values;
  for (const auto& word : split(line.substr(first, line.find(']', first) - first), ','))
    values.push_back(std::stod(word));
  return values;
}

std::vector<double> train(const std::string& folder, int ranks, int zero) {
  std::vector<double> losses;
  std::mutex loading;
  comm::run_ranks(
      ranks,
      [&](comm::Communicator& comm) {
        std::unique_lock lock(loading);
        auto module = torch::jit::load(folder + "/model.pt");
        const auto data = torch::jit::load(folder + "/data.pt");
        lock.unlock();
        const at::Tensor inputs = data.attr("inputs").toTensor(),
                         targets = data.attr("targets").toTensor();
        DataParallel dp(module, comm,
                        {.zero = zero, .bucket_bytes = 20'000, .first_bucket_bytes = 5'000});
        AdamW optimizer(dp, {{.lr = 1e-2, .weight_decay = 0.1}});
        const int64_t part = inputs.size(1) / comm.size();
        for (int64_t step = 0; step < inputs.size(0); ++step) {
          const at::Tensor x = inputs[step].narrow(0, comm.rank() * part, part),
                           y = targets[step].narrow(0, comm.rank() * part, part);
          const at::Tensor output = module.forward({x}).toTensor();
          const bool tokens = y.scalar_type() == at::kLong;
          const at::Tensor loss = tokens ? at::cross_entropy_loss(output.flatten(0, 1), y.flatten(),
                                                                  {}, at::Reduction::Sum)
                                         : (output - y).square().sum();
          const int64_t count = tokens ? y.numel() : part;
          dp.backward(loss, double(count));
          optimizer.step();
          const at::Tensor total = loss.detach().to(at::kDouble);
          comm.all_reduce(total).wait();
          if (comm.rank() == 0)
            losses.push_back(total.item<double>() / double(count * comm.size()));
        }
      },
      {.threads_per_rank = 1});
  return losses;
}

TEST(PytorchGiven, LossesAreThoseOfDdpAndFsdp2) {
  const char* folder = std::getenv("YOKE_TEST_PYTORCH");
  if (folder == nullptr) GTEST_SKIP() << "tests/pytorch_test.sh runs it";
  std::ifstream file(cat(folder, "/losses.json"));
  std::string line;
  ASSERT_TRUE(std::getline(file, line));
  for (int zero = 0; zero <= 3; ++zero)
    for (const int ranks : {1, 2}) {
      const auto ours = train(folder, ranks, zero);
      for (const auto* name : {"alone", "ddp", "fsdp2"}) {
        const auto theirs = numbers(line, name);
        ASSERT_EQ(ours.size(), theirs.size());
        for (size_t i = 0; i < ours.size(); ++i)
          EXPECT_NEAR(ours[i], theirs[i], 2e-6 * theirs[i])
              << name << ", ZeRO " << zero << " on " << ranks << " ranks, step " << i;
      }
    }
}

}  // namespace
}  // namespace yoke::parallel
