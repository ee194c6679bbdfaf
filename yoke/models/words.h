// SPDX-License-Identifier: Apache-2.0
// What models of words have in common: how their layers are made, and their loss.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "yoke/models/model.h"
#include "yoke/parallel/kernels.h"
#include "yoke/parallel/layers.h"
#include "yoke/parallel/recompute.h"

namespace yoke::models {

inline const std::string kWords = "0.words.weight";
inline std::string head_name(int64_t layers) { return std::to_string(layers + 1) + ".head.weight"; }

// Gives it its values and puts it where it is to be. A tied head begins as the words.
template <typename Module, typename Options>
parallel::Layer made(const std::shared_ptr<Module>& module, const Options& options, int64_t place,
                     bool tied, const Scale& scale) {
  const auto name_of = [&](const std::string& key) {
    const std::string name = std::to_string(place) + "." + key;
    return tied && name == head_name(options.layers) ? kWords : name;
  };
  fill(*module, options.init, options.seed, scale, name_of);
  module->to(options.device, options.dtype);
  module->split();
  return parallel::layer(module);
}

// A norm and the head.
template <typename Norm>
struct End : torch::nn::Module {
  End(Norm norm, int64_t dim, int64_t vocab, const parallel::TensorAxis& axis)
      : norm(register_module("norm", norm)),
        head(register_module("head",
                             parallel::Linear(torch::nn::LinearOptions(dim, vocab).bias(false)))),
        axis(axis) {}
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }
  void split() { head->split_outputs(axis); }
  Norm norm;
  parallel::Linear head;
  const parallel::TensorAxis axis;
};

// Start, so many blocks, which may be recomputed, and the end after a norm that `make_norm` gives.
template <typename Start, typename Block, typename Norm, typename Options>
parallel::LayersOnAxis layers_of(const Options& options, bool tied, const Scale& scale,
                                 const std::function<Norm()>& make_norm) {
  return [=](const parallel::TensorAxis& axis) {
    parallel::load_kernels(options.device, options.dim);
    std::vector<parallel::LayerFactory> factories;
    for (int64_t place = 0; place < options.layers + 2; ++place)
      factories.push_back([=] {
        const auto make = [&](auto module) { return made(module, options, place, tied, scale); };
        if (place == 0) return make(std::make_shared<Start>(options, axis));
        if (place == options.layers + 1)
          return make(std::make_shared<End<Norm>>(make_norm(), options.dim, options.vocab, axis));
        auto block = make(std::make_shared<Block>(options, axis));
        block.forward = [=, once = block.forward](const at::Tensor& x) {
          return parallel::checkpoint(options.recompute, place, once, x);
        };
        return block;
      });
    return factories;
  };
}

// The model around such layers. `block`: weights of a block's matrices.
Model words_model(int64_t layers, int64_t dim, int64_t vocab, int64_t seq, int64_t block, bool tied,
                  at::Device device);

}  // namespace yoke::models
