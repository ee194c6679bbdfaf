// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/vit.h"

#include <torch/nn/modules/conv.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/models/block.h"
#include "yoke/parallel/kernels.h"

namespace yoke::models {
namespace {

using namespace parallel;

struct Patches : torch::nn::Module {
  explicit Patches(const VitOptions& options)
      : patches(register_module(
            "patches",
            torch::nn::Conv2d(torch::nn::Conv2dOptions(options.channels, options.dim, options.patch)
                                  .stride(options.patch)))),
        token(register_parameter("token", at::zeros({1, 1, options.dim}))),
        positions(register_parameter("positions", at::zeros({1 + (options.size / options.patch) *
                                                                     (options.size / options.patch),
                                                             options.dim}))) {}
  at::Tensor forward(const at::Tensor& image) {
    const at::Tensor x = patches(image).flatten(2).transpose(1, 2);  // [batch, patches, dim]
    if (x.size(1) + 1 != positions.size(0))
      fail(Kind::Usage, "an image of ", image.size(2), " x ", image.size(3), " has ", x.size(1),
           " patches, and the model knows ", positions.size(0) - 1);
    return at::cat({token.expand({x.size(0), 1, -1}).to(x.scalar_type()), x}, 1) + positions;
  }
  torch::nn::Conv2d patches;
  at::Tensor token, positions;
};

struct End : torch::nn::Module {
  End(const BlockOptions& block, int64_t classes)
      : norm(register_module("norm", Block::make_norm(block))),
        head(register_module("head", Linear(block.dim, classes))) {}
  at::Tensor forward(const at::Tensor& x) { return head(norm(x.select(1, 0).contiguous())); }
  LayerNorm norm;
  Linear head;
};

}  // namespace

Model make_vit(const VitOptions& given) {
  VitOptions options = given;
  if (options.ffn == 0) options.ffn = 4 * options.dim;
  const auto& [layers, dim, heads, ffn, patch, channels, size, classes, seed, device, dtype,
               recompute, init] = options;
  if (std::min({layers, dim, heads, ffn, patch, channels, size}) < 1 || dim % heads != 0 ||
      size % patch != 0)
    fail(Kind::Config,
         "a vit wants layers, dim, heads, ffn, patch, channels and size from 1 on, heads that "
         "divide dim and a patch that divides size; got ",
         layers, ", ", dim, ", ", heads, ", ", ffn, ", ", patch, ", ", channels, ", ", size);
  Model model = classifier(classes, device);
  model.input = port("image", plan::Type::Fp32, {-1, channels, size, size});
  const int64_t tokens = 1 + (size / patch) * (size / patch);
  const int64_t block = 4 * dim * dim + 2 * dim * ffn, pixels = channels * patch * patch;
  model.num_parameters = dim * pixels + dim + dim + tokens * dim +
                         layers * (block + 9 * dim + ffn) + 2 * dim + dim * classes + classes;
  model.costs.assign(size_t(layers) + 2, double(tokens * block + tokens * tokens * dim));
  model.costs.front() = double(tokens * pixels * dim);
  model.costs.back() = double(dim * classes);
  model.flops = 6 * double(tokens * (layers * block + pixels * dim) + dim * classes) +
                12 * double(layers * tokens * tokens * dim);
  model.cut = {{heads, "heads"}, {ffn, "of ffn"}};
  model.layers = [options](const TensorAxis& axis) {
    load_kernels(options.device, options.dim);
    const BlockOptions block{.dim = options.dim,
                             .heads = options.heads,
                             .ffn = options.ffn,
                             .eps = 1e-6,
                             .causal = false,
                             .gelu = "none"};
    const auto made = [=](const auto& module, int64_t place) {
      return placed(module, options, place, [](const std::string& key) {
        return is_norm(key) ? -1 : key.ends_with("bias") ? 0 : 0.02;
      });
    };
    std::vector<LayerFactory> factories;
    factories.push_back([=] { return layer(made(std::make_shared<Patches>(options), 0)); });
    for (int64_t place = 1; place <= options.layers; ++place)
      factories.push_back([=] {
        const auto module = made(std::make_shared<Block>(block, axis), place);
        module->split();
        auto result = layer(module);
        result.forward = [=, once = result.forward](const at::Tensor& x) {
          return checkpoint(options.recompute, place, once, x);
        };
        return result;
      });
    factories.push_back([=] {
      return layer(made(std::make_shared<End>(block, options.classes), options.layers + 1));
    });
    return factories;
  };
  return model;
}

}  // namespace yoke::models
