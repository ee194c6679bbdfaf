// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/model.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/parallel/cross_entropy.h"

namespace yoke::models {

void draw(at::Tensor parameter, uint64_t seed, const std::string& name, double scale) {
  const at::NoGradGuard no_grad;
  if (scale == 0) {
    parameter.zero_();
    return;
  }
  const Rng rng(seed, name);
  const at::Tensor values = at::empty(parameter.sizes(), at::kFloat);
  auto* data = values.mutable_data_ptr<float>();
  at::parallel_for(0, values.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) data[i] = float(scale * rng.normal(uint64_t(i)));
  });
  parameter.copy_(values);
}

void fill(torch::nn::Module& module, const Init& init, uint64_t seed, const Scale& scale,
          const std::function<std::string(const std::string& key)>& name_of) {
  if (!init) {
    for (auto& item : module.named_parameters())
      if (const double size = scale(item.key()); size >= 0)
        draw(item.value(), seed, name_of(item.key()), size);
    return;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> taken;
  std::map<const void*, std::string> names;  // what is one is kept under its first name
  const auto take = [&](const std::string& key, at::Tensor& to) {
    const auto name = to.numel() == 0
                          ? name_of(key)
                          : names.try_emplace(to.const_data_ptr(), name_of(key)).first->second;
    const at::Tensor value = init(name);
    // A model may know more positions than are wanted.
    const at::Tensor part =
        value.dim() == 0 ? value : value.narrow(0, 0, std::min(value.size(0), to.size(0)));
    if (part.sizes() != to.sizes())
      fail(Kind::Io, "'", name, "' has the shape ", part.sizes(), ", and the model wants ",
           to.sizes());
    taken.emplace_back(to, part.to(to.device(), to.scalar_type()));
  };
  for (auto& item : module.named_parameters()) take(item.key(), item.value());
  for (auto& item : module.named_buffers()) take(item.key(), item.value());
  for (auto& [to, value] : taken) to.set_data(value);
}

Model classifier(int64_t classes, at::Device device) {
  if (classes < 2)
    fail(Kind::Config, "a model that sorts wants two classes or more, got ", classes);
  Model model{.device = device, .output = port("logits", plan::Type::Fp32, {-1, classes})};
  // Every rank of a layer has all classes.
  model.loss_sum = [](const at::Tensor& logits, const at::Tensor& target,
                      const parallel::TensorAxis&) {
    return parallel::cross_entropy_sum(logits, target);
  };
  model.num_right = [](const at::Tensor& logits, const at::Tensor& target) {
    return (logits.argmax(-1) == target).sum();
  };
  return model;
}

}  // namespace yoke::models
