// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/model.h"

#include <ATen/Functions.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::parallel {

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
                          a.sizes() == b.sizes() && a.strides() == b.strides());
}

void add_leaf(ModelParameter& parameter, const at::Tensor& leaf) {
  for (const auto& known : parameter.leaves)
    if (known.is_same(leaf)) return;
  parameter.leaves.push_back(leaf);
}

namespace {

void add(std::vector<ModelParameter>& list, const std::string& name, const at::Tensor& tensor) {
  for (auto& known : list)
    if (same_memory(known.tensor(), tensor)) {
      add_leaf(known, tensor);
      return;
    }
  list.push_back({name, {tensor}});
}

void add_parameter(Model& model, const std::string& name, const at::Tensor& tensor) {
  if (tensor.defined()) add(tensor.requires_grad() ? model.trainable : model.frozen, name, tensor);
}

std::string text_of(const ModelParameter& parameter) {
  std::vector<std::string> sizes;
  for (const int64_t size : parameter.tensor().sizes()) sizes.push_back(cat(size));
  return cat(parameter.name, " [", join(sizes, ", "), "] ",
             c10::toString(parameter.tensor().scalar_type()));
}

}  // namespace

Model model_of(const torch::nn::Module& module) {
  Model model;
  for (const auto& item : module.named_parameters()) add_parameter(model, item.key(), item.value());
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) add(model.frozen, item.key(), item.value());
  return model;
}

Model model_of(const torch::jit::Module& module) {
  Model model;
  for (const auto& item : module.named_parameters()) add_parameter(model, item.name, item.value);
  for (const auto& item : module.named_buffers())
    if (item.value.defined()) add(model.frozen, item.name, item.value);
  return model;
}

std::vector<plan::Parameter> parameters_of(const Model& model) {
  std::vector<plan::Parameter> parameters;
  for (const auto& parameter : model.trainable)
    parameters.push_back({parameter.name, parameter.tensor().sizes().vec()});
  return parameters;
}

void compare_models(const Model& model, const comm::Communicator& comm, at::Device device) {
  std::vector<std::string> lines;
  for (const auto& parameter : model.trainable) lines.push_back(text_of(parameter));
  for (const auto& parameter : model.frozen) lines.push_back("frozen " + text_of(parameter));
  const std::string mine = join(lines, "\n");
  const auto bytes = at::device(device).dtype(at::kByte);
  const at::Tensor length =
      at::full({1}, int64_t(mine.size()), at::device(device).dtype(at::kLong));
  comm.broadcast(length, 0).wait();
  at::Tensor text = at::from_blob(const_cast<char*>(mine.data()), {int64_t(mine.size())}, at::kByte)
                        .clone()
                        .to(device);
  if (comm.rank() != 0) text = at::empty({length.item<int64_t>()}, bytes);
  comm.broadcast(text, 0).wait();
  text = text.cpu().contiguous();
  const std::string theirs(static_cast<const char*>(text.const_data_ptr()), size_t(text.numel()));
  if (theirs != mine) {
    const auto want = split(theirs, '\n');
    size_t i = 0;
    while (i < want.size() && i < lines.size() && want[i] == lines[i]) ++i;
    fail(Kind::Usage, "the model of rank ", comm.rank(), " is not that of rank 0: it has ",
         i < lines.size() ? cat("'", lines[i], "'") : "no more", " where rank 0 has ",
         i < want.size() ? cat("'", want[i], "'") : "no more",
         "; build the same model on every rank");
  }
  comm.barrier();  // nobody goes on with a model that another has refused
}

}  // namespace yoke::parallel
