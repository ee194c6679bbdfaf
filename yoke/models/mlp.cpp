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

// From the shape of a sample to a vector.
struct Start : torch::nn::Module {
  Start(int64_t inputs, int64_t dim) : in(register_module("in", Linear(inputs, dim))) {}
  at::Tensor forward(const at::Tensor& x) { return at::gelu(in(x.flatten(1))); }
  Linear in;
};

}  // namespace

Model make_mlp(const MlpOptions& given) {
  MlpOptions options = given;
  if (options.ffn == 0) options.ffn = 4 * options.dim;
  const auto& [layers, dim, ffn, sample, classes, seed, device, dtype, init] = options;
  const bool sorts = classes > 0;
  int64_t inputs = 1;
  for (const int64_t size : sample) inputs *= size;
  if (std::min({layers, dim, ffn, inputs}) < 1 || sorts == sample.empty())
    fail(Kind::Config,
         "an mlp wants layers, dim and ffn from 1 on, and samples of a shape with classes; got ",
         layers, ", ", dim, ", ", ffn, ", ", at::IntArrayRef(sample), " and ", classes);
  Model model = sorts ? classifier(classes, device) : Model{.device = device};
  const int64_t around = sorts ? inputs * dim + dim * classes : 0;
  model.num_parameters =
      layers * (2 * dim * ffn + dim + ffn) + around + (sorts ? dim + classes : 0);
  model.flops = 6.0 * double(2 * layers * dim * ffn + around);
  model.cut = {{ffn, "of ffn"}};
  model.costs.assign(size_t(layers), double(2 * dim * ffn));
  if (sorts) {
    model.input = port("x", plan::Type::Fp32, {-1});
    for (const int64_t size : sample) model.input.shape.push_back({size, size});
    model.costs.insert(model.costs.begin(), double(inputs * dim));
    model.costs.push_back(double(dim * classes));
  } else {
    model.input = port("x", plan::Type::Fp32, {-1, dim});
    model.output = port("y", plan::Type::Fp32, {-1, dim});
    model.loss_sum = [](const at::Tensor& output, const at::Tensor& target, const TensorAxis&) {
      return (output - target).square().mean(-1).sum();
    };
  }
  model.layers = [options, sorts, inputs](const TensorAxis& axis) {
    std::vector<LayerFactory> factories;
    const auto add = [&](auto make, const Scale& scale, auto split) {
      factories.push_back([=, place = factories.size()] {
        const auto module = placed(make(), options, int64_t(place), scale);
        split(*module);
        return layer(module);
      });
    };
    const auto scale_of = [](double width) {
      return
          [=](const std::string& key) { return key.ends_with("bias") ? 0 : 1 / std::sqrt(width); };
    };
    const auto nothing = [](auto&) {};
    if (sorts)
      add([=] { return std::make_shared<Start>(inputs, options.dim); }, scale_of(double(inputs)),
          nothing);
    const Scale within = [=](const std::string& key) {
      const int64_t width = key == "up.weight" ? options.dim : options.ffn * options.layers;
      return scale_of(double(width))(key);
    };
    for (int64_t i = 0; i < options.layers; ++i)
      add([=] { return std::make_shared<Block>(options); }, within,
          [=](Block& block) {
            block.up->split_outputs(axis);
            block.down->split_inputs(axis);
          });
    if (sorts)
      add([=] { return std::make_shared<LinearImpl>(options.dim, options.classes); },
          scale_of(double(options.dim)), nothing);
    return factories;
  };
  return model;
}

}  // namespace yoke::models
