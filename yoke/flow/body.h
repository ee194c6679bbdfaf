// SPDX-License-Identifier: Apache-2.0
// What a node computes: a function, a module, a file of a model, or a word that Yoke knows. A node
// has one on its device; copies of a node each open their own.
// Threads: that of the node's queue.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/plan/port.h"

namespace torch::nn {
class Module;
}

namespace yoke::flow {

using Tensors = std::vector<at::Tensor>;
// In the order of the ports. `firing` counts a node's calls from 0, over all rounds.
using Function = std::function<Tensors(const Tensors& inputs, int64_t firing)>;

struct Body {
  Function run = nullptr;
  Tensors weights = {};                                   // that gradients reach
  Tensors buffers = {};                                   // what else it keeps: running means
  bool compiled = false;                                  // a package, which refuses a single row
  std::function<void(bool training)> set_mode = nullptr;  // of dropout and the like
  // Of its node: a model that gives a dictionary gives what bears these names.
  std::function<void(const std::vector<std::string>& names)> name_outputs = nullptr;
  std::string without_gradients = {};                 // why none can cross it; empty: they can
  std::vector<plan::Port> inputs = {}, outputs = {};  // as far as it knows them
  bool draws = false;                                 // from LibTorch's generator: dropout
  uint64_t bytes = 0;                                 // of weights and buffers
  Tensors state() const;                              // weights, then buffers
};
using Open = std::function<Body(at::Device device)>;

Open function(Function run);
Open function(std::function<at::Tensor(const Tensors&)> run);
// A module of one's own, whose forward() takes a tensor for each input, or all as Tensors; `make`
// is called once for each copy of the node, which then get the first one's weights.
template <typename Make>
Open module(Make make);
Body body_of(std::shared_ptr<torch::nn::Module> module, Function run, at::Device device);

// TorchScript (trained too), .pt2, a run, checkpoint or Hugging Face folder. Throws Kind::Io.
Open file(std::string path, std::vector<plan::Port> inputs = {},
          std::vector<plan::Port> outputs = {});

// Of two bodies of one kind: the second gets the first one's, buffers too.
void copy_weights(const Body& from, const Body& to);

// A safetensors file of weights and buffers in their order, and a body that begins with them.
// Throw Kind::Io.
void save_weights(const Body& body, const std::string& path);
Open with_weights(Open open, std::string path);

template <typename Make>
Open module(Make make) {
  return [make](at::Device device) {
    auto made = make();
    return body_of(
        made.ptr(),
        [made](const Tensors& in, int64_t) mutable -> Tensors {
          if constexpr (requires(Tensors out) { out = made->forward(in); }) {
            return made->forward(in);
          } else {
            if constexpr (requires { made->forward(in[0]); })
              if (in.size() == 1) return {made->forward(in[0])};
            if constexpr (requires { made->forward(in[0], in[1]); })
              if (in.size() == 2) return {made->forward(in[0], in[1])};
            if constexpr (requires { made->forward(in[0], in[1], in[2]); })
              if (in.size() == 3) return {made->forward(in[0], in[1], in[2])};
            fail(Kind::Usage, "the module's forward() does not take ", in.size(), " tensors");
          }
        },
        device);
  };
}

}  // namespace yoke::flow
