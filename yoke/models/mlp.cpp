// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/mlp.h"

#include <ATen/Functions.h>

#include <cmath>

#include "yoke/base/error.h"
#include "yoke/parallel/layers.h"

namespace yoke::models {
namespace {

using namespace parallel;

struct Block : torch::nn::Module {
  explicit Block(const MlpOptions& options)
      : up(register_module("up", Linear(options.dim, options.ffn))),
        down(register_module("down", Linear(options.ffn, options.dim))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  Linear up, down;
};

}  // namespace

Model make_mlp(const MlpOptions& given) {
  MlpOptions options = given;
  if (options.ffn == 0) options.ffn = 4 * options.dim;
  const auto& [layers, dim, ffn, seed, device] = options;
  if (std::min({layers, dim, ffn}) < 1)
    fail(Kind::Config, "an mlp wants layers, dim and ffn from 1 on, got ", layers, ", ", dim, ", ",
         ffn);
  Model model{.num_parameters = layers * (2 * dim * ffn + dim + ffn),
              .flops = 12.0 * double(layers * dim * ffn),
              .device = device};
  model.cut = {{ffn, "of ffn"}};
  model.layers = [options](const TensorAxis& axis) {
    std::vector<LayerFactory> factories;
    for (int64_t place = 0; place < options.layers; ++place)
      factories.push_back([=] {
        const auto block = std::make_shared<Block>(options);
        for (auto& item : block->named_parameters()) {
          const bool is_up = item.key() == "up.weight";
          const double width = double(is_up ? options.dim : options.ffn * options.layers);
          draw(item.value(), options.seed, cat(place, ".", item.key()),
               item.key().ends_with("bias") ? 0 : 1 / std::sqrt(width));
        }
        block->to(options.device);
        block->up->split_outputs(axis);
        block->down->split_inputs(axis);
        return layer(block);
      });
    return factories;
  };
  model.loss_sum = [](const at::Tensor& output, const at::Tensor& target, const TensorAxis&) {
    return (output - target).square().mean(-1).sum();
  };
  return model;
}

}  // namespace yoke::models
