// SPDX-License-Identifier: Apache-2.0
// A model with parts on devices of our choice, here all on the CPU: two branches that run at the
// same time between a first and a last part. Then the same parts as a pipeline, by another word.
#include <torch/nn.h>
#include <torch/optim.h>

#include <iostream>

#include "yoke/yoke.h"

using yoke::parallel::layer;

int main() {
  const at::Device here("cpu"), there("cpu");  // with two GPUs: cuda:0 and cuda:1
  const auto branches = yoke::parallel::side_by_side(
      {{layer(torch::nn::Linear(16, 16)), here}, {layer(torch::nn::Linear(16, 16)), there}},
      [](const auto& results) { return at::tanh(results[0]) * at::sigmoid(results[1]); });
  const std::vector<yoke::parallel::Placed> parts = {
      {layer(torch::nn::Linear(2, 16)), here},
      {branches, here},
      {layer(torch::nn::Linear(16, 1)), there},
      {layer(torch::nn::Flatten(torch::nn::FlattenOptions().start_dim(0))), there}};
  const at::Tensor x = at::rand({256, 2}) * 4 - 2, y = (x.select(1, 0) * x.select(1, 1)).sin();

  const auto model = yoke::parallel::in_series(parts);  // as any module
  torch::optim::AdamW optimizer(model.module->parameters(), 0.01);
  for (int step = 1; step <= 100; ++step) {
    optimizer.zero_grad();
    (model.forward(x) - y).square().mean().backward();
    optimizer.step();
  }
  std::cout << "in series: loss " << (model.forward(x) - y).square().mean().item<float>() << "\n";

  yoke::parallel::run_pipeline(parts, "1f1b", 8, [&](yoke::parallel::Pipeline& pipeline) {
    yoke::parallel::AdamW adam(pipeline.data(), {{.lr = 0.01}});
    for (int step = 1; step <= 100; ++step) {
      pipeline.run({.input = [&](int micro) { return x.narrow(0, micro * 32, 32); },
                    .loss =
                        [&](const at::Tensor& out, int micro) {
                          return yoke::parallel::Pipeline::Loss{
                              (out - y.narrow(0, micro * 32, 32)).square().sum(), 32.0};
                        }});
      adam.step();
    }
  });
  std::cout << "as a pipeline: loss " << (model.forward(x) - y).square().mean().item<float>()
            << "\n";
}
