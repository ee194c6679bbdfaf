// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/state.h"

#include <ATen/Functions.h>
#include <torch/nn/module.h>

#include <map>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/observe/json_lines.h"
#include "yoke/parallel/layers.h"

namespace yoke::train {
namespace {

using checkpoint::Piece;
using parallel::ParameterSplit;

class Pieces {
 public:
  // `mine`: only what it is for this rank to save, so that every element is saved once.
  Pieces(parallel::Pipeline& pipeline, parallel::Optimizer& optimizer, bool mine)
      : dp_(pipeline.data()),
        tp_(pipeline.mesh().tp),
        mine_(mine),
        replicas_(dp_.options().zero == 0) {
    for (const auto& unit : dp_.units())
      for (const auto& split : parallel::splits_of(*unit)) splits_[split.name] = split;
    for (const auto& shared : dp_.options().shared)
      for (const auto& name : shared.names)  // they go by the first one's name
        if (shared.tied && splits_.contains(name)) splits_[shared.names[0]] = splits_[name];
    const auto& parameters = dp_.layout().parameters;
    const auto parts = dp_.parts();
    const auto& state = optimizer.state();
    steps.resize(parameters.size());
    for (size_t p = 0; p < parameters.size(); ++p)
      steps[p] = at::scalar_tensor(optimizer.parameter_steps()[p], at::kLong);
    for (size_t b = 0; b < parts.size(); ++b)
      for (const auto& piece : parts[b].pieces) {
        const auto p = size_t(piece.parameter);
        if (mine && !(parts[b].counts && (!replicas_ || has_turn(p)))) continue;
        const auto& [name, shape] = parameters[p];
        add_range("model/" + name, name, shape, parts[b].weights, piece);
        for (const auto& [kind, tensors] : state)
          add_range(cat("optimizer/", kind, "/", name), name, shape, tensors[b], piece);
        // Of a split parameter every rank has the same number.
        const bool first = piece.first == 0 && (!splits_.contains(name) || tp_.rank() == 0);
        if (!mine || first) pieces.push_back({cat("optimizer/steps/", name), {}, {}, steps[p]});
      }
    size_t turn = 0;
    for (const auto& unit : dp_.units()) {
      for (const auto& item : unit->named_parameters())
        if (!item.value().requires_grad()) add_whole(item.key(), item.value(), turn++);
      // Of norms that replicas take by themselves those of one belong together.
      for (const auto& item : unit->named_buffers()) add_whole(item.key(), item.value(), 0);
    }
  }

  std::vector<Piece> pieces;
  std::vector<at::Tensor> steps;  // of each parameter

 private:
  bool has_turn(size_t number) const {
    return int(number % size_t(dp_.comm().size())) == dp_.comm().rank();
  }

  // Elements of this rank's part of a parameter that lie in flat memory.
  void add_range(const std::string& name, const std::string& parameter,
                 const std::vector<int64_t>& shape, const at::Tensor& flat,
                 const plan::Piece& range) {
    int64_t at = range.offset;
    for (const auto& box : plan::boxes_of_range(shape, range.first, range.count)) {
      add_box(name, parameter, shape, box, flat.narrow(0, at, box.count()).view(box.shape));
      at += box.count();
    }
  }

  void add_box(const std::string& name, const std::string& parameter,
               const std::vector<int64_t>& shape, const plan::Box& box, const at::Tensor& value) {
    const auto split = splits_.find(parameter);
    if (split == splits_.end()) {
      pieces.push_back({name, shape, box, value});
      return;
    }
    const auto dim = split->second.dim;
    auto whole = shape;
    whole[size_t(dim)] *= tp_.size();
    const plan::Cut cut{dim, split->second.parts, tp_.rank(), tp_.size()};
    for (const auto& [there, here] : plan::place(box, cut)) {
      const auto d = size_t(dim);
      pieces.push_back(
          {name, whole, there, value.narrow(dim, here.offset[d] - box.offset[d], here.shape[d])});
    }
  }

  // What is not trained.
  void add_whole(const std::string& name, const at::Tensor& value, size_t turn) {
    if (mine_ && !(has_turn(turn) && (splits_.contains(name) || tp_.rank() == 0))) return;
    const auto shape = value.sizes().vec();
    add_box("model/" + name, name, shape, plan::whole_box(shape), value.detach());
  }

  parallel::DataParallel& dp_;
  const comm::Communicator tp_;
  const bool mine_, replicas_;
  std::map<std::string, ParameterSplit> splits_;
};

}  // namespace

void save_state(parallel::Pipeline& pipeline, parallel::Optimizer& optimizer, int64_t step,
                checkpoint::Strings values, checkpoint::Saver& saver) {
  pipeline.data().finish();
  const auto& scale = pipeline.data().loss_scale();
  values["optimizer_steps"] = cat(optimizer.num_steps());
  if (pipeline.data().options().precision == parallel::Precision::Fp16) {
    values["loss_scale"] = observe::json_number(scale.value);
    values["loss_scale_good_steps"] = cat(scale.num_good);
  }
  saver.save(step, {Pieces(pipeline, optimizer, /*mine=*/true).pieces, std::move(values)});
}

void load_state(parallel::Pipeline& pipeline, parallel::Optimizer& optimizer,
                const checkpoint::Saved& saved) {
  Pieces wanted(pipeline, optimizer, /*mine=*/false);
  const bool begins =
      parse_int(saved.value("optimizer_steps")) == 0;  // with a model from elsewhere
  if (begins) {
    std::erase_if(wanted.pieces,
                  [](const Piece& piece) { return !piece.name.starts_with("model/"); });
    for (const auto& [kind, tensors] : optimizer.state())
      for (const auto& tensor : tensors) tensor.zero_();
    for (const auto& step : wanted.steps) step.zero_();
  }
  saved.read(wanted.pieces);
  std::vector<int64_t> steps;
  for (const auto& step : wanted.steps) steps.push_back(step.item<int64_t>());
  optimizer.restored(parse_int(saved.value("optimizer_steps")).value_or(0), std::move(steps));
  auto& dp = pipeline.data();
  dp.restored();
  if (dp.options().precision == parallel::Precision::Fp16 && saved.values().contains("loss_scale"))
    dp.set_loss_scale(
        {.value = std::stod(saved.value("loss_scale")),
         .num_good = int(parse_int(saved.value("loss_scale_good_steps")).value_or(0))});
}

}  // namespace yoke::train
