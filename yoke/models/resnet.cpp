// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/resnet.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/conv.h>

#include <cmath>
#include <map>
#include <memory>

#include "yoke/base/error.h"
#include "yoke/parallel/batch_norm.h"
#include "yoke/parallel/layers.h"

namespace yoke::models {
namespace {

using namespace parallel;

constexpr int64_t kSmall = 64;  // pixels
constexpr int64_t kWiden = 4;   // of a block with a neck

// A convolution and its norm.
struct Conv : torch::nn::Module {
  Conv(int64_t in, int64_t out, int64_t kernel, int64_t stride, const comm::Communicator& replicas)
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                                                           .stride(stride)
                                                           .padding(kernel / 2)
                                                           .bias(false)))),
        norm(register_module(
            "norm", std::make_shared<BatchNorm>(BatchNormOptions{.features = out}, replicas))) {}
  at::Tensor forward(const at::Tensor& x) { return norm->forward(conv(x)); }
  torch::nn::Conv2d conv;
  std::shared_ptr<BatchNorm> norm;
};

struct Stem : torch::nn::Module {
  Stem(const ResnetOptions& options, const comm::Communicator& replicas)
      : is_small(options.size <= kSmall),
        first(register_module(
            "first", std::make_shared<Conv>(options.channels, options.width, is_small ? 3 : 7,
                                            is_small ? 1 : 2, replicas))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = first->forward(x).relu_();
    return is_small ? y : at::max_pool2d(y, 3, 2, 1);
  }
  const bool is_small;
  std::shared_ptr<Conv> first;
};

struct Place {
  int64_t in = 0, features = 0, stride = 1;
  bool neck = false;
  int64_t out() const { return neck ? kWiden * features : features; }
  bool changes() const { return stride > 1 || in != out(); }
};

struct ResnetBlock : torch::nn::Module {
  ResnetBlock(const Place& place, const comm::Communicator& replicas) {
    const auto add = [&](int64_t in, int64_t out, int64_t kernel, int64_t stride) {
      const auto conv = std::make_shared<Conv>(in, out, kernel, stride, replicas);
      convs.push_back(register_module(cat("conv", convs.size() + 1), conv));
    };
    const auto& [in, features, stride, neck] = place;
    if (neck) {
      add(in, features, 1, 1);
      add(features, features, 3, stride);
      add(features, place.out(), 1, 1);
    } else {
      add(in, features, 3, stride);
      add(features, features, 3, 1);
    }
    if (place.changes())
      shortcut =
          register_module("shortcut", std::make_shared<Conv>(in, place.out(), 1, stride, replicas));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& conv : convs) {
      y = conv->forward(y);
      if (conv != convs.back()) y = y.relu_();
    }
    return (y + (shortcut ? shortcut->forward(x) : x)).relu_();
  }
  std::vector<std::shared_ptr<Conv>> convs;
  std::shared_ptr<Conv> shortcut;
};

struct Head : torch::nn::Module {
  Head(int64_t features, int64_t classes)
      : head(register_module("head", Linear(features, classes))) {}
  at::Tensor forward(const at::Tensor& x) { return head(x.mean(at::IntArrayRef{2, 3})); }
  Linear head;
};

std::vector<Place> places_of(const ResnetOptions& options) {
  const std::map<int64_t, std::vector<int>> known{
      {18, {2, 2, 2, 2}}, {34, {3, 4, 6, 3}}, {50, {3, 4, 6, 3}}};
  const auto counts = known.find(options.depth);
  if (counts == known.end())
    fail(Kind::Config, "a resnet has 18, 34 or 50 layers, got ", options.depth);
  std::vector<Place> places;
  int64_t in = options.width;
  for (size_t group = 0; group < counts->second.size(); ++group)
    for (int block = 0; block < counts->second[group]; ++block) {
      places.push_back({.in = in,
                        .features = options.width << group,
                        .stride = group > 0 && block == 0 ? 2 : 1,
                        .neck = options.depth >= 50});
      in = places.back().out();
    }
  return places;
}

}  // namespace

Model make_resnet(const ResnetOptions& options) {
  const auto& [depth, width, channels, size, classes, local, seed, device, dtype, init] = options;
  if (std::min({width, channels, size}) < 1)
    fail(Kind::Config, "a resnet wants width, channels and size from 1 on, got ", width, ", ",
         channels, " and ", size);
  Model model = classifier(classes, device);
  const auto places = places_of(options);
  model.input = port("image", plan::Type::Fp32, {-1, channels, -1, -1});
  model.why_whole = "convolutions are not cut";
  // Weights, and products for one image, of each layer.
  int64_t side = size <= kSmall ? size : (size + 1) / 2;
  double products = 0;
  const auto conv = [&](int64_t in, int64_t out, int64_t kernel) {
    model.num_parameters += in * out * kernel * kernel + 2 * out;
    products += double(in * out * kernel * kernel * side * side);
  };
  const auto end_layer = [&] {
    model.costs.push_back(products);
    model.flops += 6 * products;
    products = 0;
  };
  conv(channels, width, size <= kSmall ? 3 : 7);
  if (size > kSmall) side = (side + 1) / 2;
  end_layer();
  for (const auto& place : places) {
    if (place.neck) conv(place.in, place.features, 1);
    if (place.stride > 1) side = (side + 1) / 2;
    if (place.neck) {
      conv(place.features, place.features, 3);
      conv(place.features, place.out(), 1);
    } else {
      conv(place.in, place.features, 3);
      conv(place.features, place.features, 3);
    }
    if (place.changes()) conv(place.in, place.out(), 1);
    end_layer();
  }
  const int64_t last = places.back().out();
  model.num_parameters += last * classes + classes;
  products = double(last * classes);
  end_layer();
  model.layers = [options, places, last](const TensorAxis& axis) {
    const auto replicas = options.local ? comm::Communicator() : axis.replicas;
    const auto made = [=](const auto& module, int64_t place) {
      const auto parameters = module->named_parameters();
      const auto scale = [&](const std::string& key) {
        if (is_norm(key)) return -1.0;
        if (key.ends_with("bias")) return 0.0;
        const at::Tensor value = parameters[key];  // He et al., 2015
        return value.dim() == 4 ? std::sqrt(2.0 / double(value.numel() / value.size(1)))
                                : 1 / std::sqrt(double(value.size(1)));
      };
      return layer(placed(module, options, place, scale));
    };
    std::vector<LayerFactory> factories;
    factories.push_back([=] { return made(std::make_shared<Stem>(options, replicas), 0); });
    for (size_t i = 0; i < places.size(); ++i)
      factories.push_back(
          [=] { return made(std::make_shared<ResnetBlock>(places[i], replicas), int64_t(i) + 1); });
    factories.push_back([=] {
      return made(std::make_shared<Head>(last, options.classes), int64_t(places.size()) + 1);
    });
    return factories;
  };
  return model;
}

}  // namespace yoke::models
