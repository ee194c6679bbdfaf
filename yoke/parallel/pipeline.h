// SPDX-License-Identifier: Apache-2.0
// Runs a schedule (plan/schedule.h): a sequence of layers, cut into stages, of which every rank of
// the pipeline has its own, with data parallelism between pipelines. Activations go from stage to
// stage and their gradients back, as the schedule says; each is freed when the schedule has no more
// use for it. Backward in two halves wants layers that can part them (layers.h); the others do both
// at I.
//
//   Pipeline pipeline(layers, make_schedule("1f1b", {.ranks = 4, .micro_batches = 8}), mesh);
//   AdamW optimizer(pipeline.data());
//   pipeline.run({.input = ..., .loss = ...});
//   optimizer.step();
//
// Collective: construction and run(), by every rank of the mesh. Threads: the rank's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "yoke/parallel/data_parallel.h"
#include "yoke/parallel/mesh_groups.h"
#include "yoke/parallel/passing.h"
#include "yoke/plan/simulate.h"

namespace yoke::parallel {

// From one tensor to one. Its parameters are those of the module, which may be null.
struct Layer {
  std::shared_ptr<torch::nn::Module> module = nullptr;
  std::function<at::Tensor(const at::Tensor&)> forward = nullptr;
};
// A module with forward(tensor); or torch's holder of one.
template <typename Module>
Layer layer(std::shared_ptr<Module> module) {
  return {module, [module](const at::Tensor& input) { return module->forward(input); }};
}
template <typename Holder>
Layer layer(const Holder& holder) requires requires {
  holder.ptr();
}
{ return layer(holder.ptr()); }
// Called on the rank that has the layer alone; the others never make it.
using LayerFactory = std::function<Layer()>;

struct PipelineOptions {
  // How many layers each stage has; empty: equal parts, or by `layer_cost` where that is given.
  std::vector<int> layers_per_stage = {};
  std::vector<double> layer_cost = {};  // of each layer, in any unit
  // Parameters that are one, by the place of their layer: {{"0.weight", "25.weight"}}, the
  // embedding and the head. Where they are on several ranks, each has a copy, and their gradients
  // are added.
  std::vector<std::vector<std::string>> ties = {};
  bool sequence = false;  // what TensorAxis of the layers has
  // Parameters (patterns, plan::matches) that every rank of a layer has, and uses on its own part
  // of the activations: a norm of its heads. Each has a part of the gradient. With `sequence` all
  // are.
  std::vector<std::string> partial = {};
  // ZeRO 3: the schedule says when a stage's parameters are gathered, or it is added to it.
  DataParallelOptions data = {};
};

class Pipeline {
 public:
  // Messages and reductions are added where the schedule has none. Throws Kind::Usage if it is not
  // right, or not for so many ranks and layers.
  Pipeline(const std::vector<LayerFactory>& layers, const plan::Schedule& schedule,
           const MeshGroups& mesh, const PipelineOptions& options = {});
  ~Pipeline();

  struct Loss {
    at::Tensor sum = {};  // one element
    double count = 0;     // samples or tokens in it
  };
  struct Batch {
    // The first stage's rank is asked for its micro-batches, and the last stage's for the loss.
    std::function<at::Tensor(int micro)> input = nullptr;
    std::function<Loss(const at::Tensor& output, int micro)> loss = nullptr;
    // What the layers of every stage may know of its micro-batches; may be empty.
    std::function<Passing(int micro)> passing = nullptr;
  };
  // Forward and backward of all micro-batches; then comes the optimizer's step. Returns the sum of
  // the losses of this replica, detached, on the rank of the last stage; elsewhere an undefined
  // one. Shapes are those of the first run.
  // Every rank of a layer (tp) gives the same input and gets the same loss. Where the schedule
  // computes again, `loss` is called again.
  Loss run(const Batch& batch);
  // Forward alone, without gradients, as modules do it that are not in training.
  Loss evaluate(const Batch& batch);

  DataParallel& data();
  at::Device device() const;  // of this rank's parameters
  const MeshGroups& mesh() const;
  const plan::Schedule& schedule() const;
  const std::vector<int>& layers_per_stage() const;
  // What this rank's host did in the last run, in seconds from its start; as waits end, not as they
  // begin.
  const std::vector<plan::Timed>& times() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::parallel
