// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "yoke/base/text.h"
#include "yoke/checkpoint/safetensors.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/models/generate.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/parallel/parallelize.h"
#include "yoke/train/resolve.h"

namespace yoke::train {
namespace {

using checkpoint::Path;
using parallel::Pipeline;

struct Given {
  explicit Given(const Path& folder) : file(folder / "given.safetensors") {
    const at::Tensor text = file.tensor("text");
    input = text.narrow(1, 0, text.size(1) - 1).contiguous();
    target = text.narrow(1, 1, text.size(1) - 1).contiguous();
  }
  checkpoint::SafetensorsFile file;
  at::Tensor input, target;
};

// Losses before and after a step of SGD.
std::vector<double> train(const models::Model& model, const Given& given, const std::string& text) {
  auto plan = plan::parse_plan(text);
  plan.ties = model.ties;
  std::vector<double> losses;
  comm::run_ranks(plan.num_ranks(),
                  [&](comm::Communicator& world) {
                    const auto pipeline = parallel::parallelize(model.layers, plan, world);
                    const parallel::TensorAxis axis{pipeline->mesh().tp, plan.sequence};
                    parallel::Sgd optimizer(pipeline->data(), {{.lr = 0.1}, 0});
                    const int64_t each = given.input.size(0) / plan.dp / plan.micro_batches;
                    const auto part = [&](const at::Tensor& all, int micro) {
                      return all.narrow(
                          0, (pipeline->mesh().dp.rank() * plan.micro_batches + micro) * each,
                          each);
                    };
                    const Pipeline::Batch batch{
                        .input = [&](int micro) { return part(given.input, micro); },
                        .loss =
                            [&](const at::Tensor& output, int micro) {
                              const at::Tensor target = part(given.target, micro);
                              return Pipeline::Loss{model.loss_sum(output, target, axis),
                                                    double(target.numel())};
                            }};
                    for (const bool steps : {true, false}) {
                      const auto loss = steps ? pipeline->run(batch) : pipeline->evaluate(batch);
                      if (steps) optimizer.step();
                      const at::Tensor sum = at::zeros({1}, at::kDouble);
                      if (loss.sum.defined() && axis.rank() == 0) sum.add_(loss.sum);
                      world.all_reduce(sum).wait();
                      if (world.rank() == 0)
                        losses.push_back(sum.item<double>() / double(given.target.numel()));
                    }
                  },
                  {.threads_per_rank = 1});
  return losses;
}

}  // namespace

TEST(Transformers, GiveTheSameLogitsAndLosses) {
  const char* folder = std::getenv("YOKE_TEST_TRANSFORMERS");
  if (folder == nullptr) GTEST_SKIP() << "tests/transformers_test.sh runs it";
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const Given given(entry.path());
    const auto options = models::read_hugging_face(entry.path());
    const auto model = models::make_words(options);
    const models::Whole whole(models::as_architecture(options), at::kCPU);
    const at::Tensor logits = whole.forward(given.input);
    EXPECT_LT((logits - given.file.tensor("logits")).abs().max().item<double>(), 1e-4)
        << entry.path();
    // What it writes, always the likeliest.
    const at::Tensor all = given.file.tensor("generated");
    const auto* tokens = all.const_data_ptr<int64_t>();
    EXPECT_EQ(models::generate(whole, {tokens, tokens + 8},
                               {.tokens = all.numel() - 8, .sampling = {.temperature = 0}}),
              std::vector<int64_t>(tokens + 8, tokens + all.numel()))
        << entry.path();
    for (const std::string plan :
         {"", "dp=2", "tp=2", "pp=2 micro=2 schedule=zbv", "dp=2 zero=3"}) {
      const auto losses = train(model, given, plan);
      for (int64_t i = 0; i < 2; ++i)
        EXPECT_NEAR(losses[size_t(i)], given.file.tensor("losses")[i].item<double>(), 2e-5)
            << entry.path() << ", " << plan;
    }
    const auto init = std::visit([](const auto& chosen) { return chosen.init; }, options);
    models::write_hugging_face(entry.path() / "ours", options, init);
    ++count;
  }
  EXPECT_EQ(count, 4);
}

}  // namespace yoke::train
