// SPDX-License-Identifier: Apache-2.0
// An ordinary sequence of modules, spread over four ranks by a plan: two stages of a pipeline, each
// twice. Try "pp=4 micro=8 schedule=zb-h1", or "pp=2 tp=2 micro=4 split=0:outputs split=2:inputs":
// the losses stay the same.
#include <torch/nn.h>

#include <iostream>

#include "yoke/yoke.h"

int main() {
  const auto plan = yoke::plan::parse_plan("pp=2 dp=2 micro=4 schedule=zbv zero=1");
  const at::Tensor x = at::rand({256, 2}) * 4 - 2, y = (x.select(1, 0) * x.select(1, 1)).sin();
  yoke::comm::run_ranks(plan.num_ranks(), [&](yoke::comm::Communicator& world) {
    torch::nn::Sequential net(
        torch::nn::Linear(2, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32), torch::nn::Tanh(),
        torch::nn::Linear(32, 1), torch::nn::Flatten(torch::nn::FlattenOptions().start_dim(0)));
    const auto pipeline = yoke::parallel::parallelize(*net, plan, world);
    yoke::parallel::AdamW optimizer(pipeline->data(), {{.lr = 0.01, .clip = 1.0}});
    const int64_t count = 256 / plan.dp / plan.micro_batches;
    auto part = [&](const at::Tensor& all, int micro) {  // of this replica
      const int replica = pipeline->data().comm().rank();
      return all.narrow(0, (replica * plan.micro_batches + micro) * count, count);
    };
    for (int step = 1; step <= 200; ++step) {
      const auto loss =
          pipeline->run({.input = [&](int micro) { return part(x, micro); },
                         .loss =
                             [&](const at::Tensor& output, int micro) {
                               return yoke::parallel::Pipeline::Loss{
                                   (output - part(y, micro)).square().sum(), double(count)};
                             }});
      const auto info = optimizer.step();
      if (loss.sum.defined() && pipeline->data().comm().rank() == 0 && step % 50 == 0)
        std::cout << "step " << step << "   loss of a replica "
                  << loss.sum.item<float>() / loss.count << "   gradient norm " << info.grad_norm()
                  << "\n";
    }
  });
}
