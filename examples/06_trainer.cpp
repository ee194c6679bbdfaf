// SPDX-License-Identifier: Apache-2.0
// A model, a loss and data of one's own, trained by two replicas, with checkpoints and a callback.
// Stop it and start it again: it goes on where it was.
#include <torch/nn.h>

#include <filesystem>
#include <iostream>

#include "yoke/yoke.h"

struct Net : torch::nn::Module {
  Net()
      : in(register_module("in", torch::nn::Linear(2, 32))),
        out(register_module("out", torch::nn::Linear(32, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(in(x))); }
  torch::nn::Linear in, out;
};

// Points of the plane, inside of a circle or not.
struct Circle : yoke::data::Dataset {
  int64_t size() const override { return 10000; }
  yoke::data::Batch batch(const std::vector<int64_t>& samples) const override {
    at::Tensor points = at::empty({int64_t(samples.size()), 2});
    for (size_t i = 0; i < samples.size(); ++i)
      for (int64_t d = 0; d < 2; ++d)
        points[int64_t(i)][d] =
            2 * yoke::Rng(1, "circle").uniform(uint64_t(2 * samples[i] + d)) - 1;
    return {points, (points.square().sum(1) < 0.5).to(at::kLong)};
  }
};

int main() {
  yoke::models::Model model;
  model.layers = [](const yoke::parallel::TensorAxis&) {
    return std::vector<yoke::parallel::LayerFactory>{
        [] { return yoke::parallel::layer(std::make_shared<Net>()); }};
  };
  model.loss_sum = [](const at::Tensor& output, const at::Tensor& target, const auto&) {
    return at::cross_entropy_loss(output, target, {}, at::Reduction::Sum);
  };
  const auto folder = std::filesystem::temp_directory_path() / "yoke-circle";
  yoke::train::Trainer trainer(model, std::make_shared<Circle>(),
                               {.plan = yoke::plan::parse_plan("dp=2 zero=1"),
                                .steps = 200,
                                .batch = 64,
                                .lr = {.lr = 0.02, .steps = 200},
                                .checkpoints = folder,
                                .save_every = 50,
                                .resume = true});
  trainer.callbacks.on_step = [](const yoke::train::Step& step) {
    if (step.step % 50 == 0) std::cout << "step " << step.step << "   loss " << step.loss << "\n";
  };
  yoke::comm::run_ranks(2, [&](yoke::comm::Communicator& world) { trainer.fit(world); });
  std::filesystem::remove_all(folder);
}
