// SPDX-License-Identifier: Apache-2.0
// A model and a plan (plan/plan.h): together they are a pipeline of stages with layers that are cut
// over ranks and replicas beside them.
//   const auto pipeline = parallelize(layers, parse_plan("pp=2 dp=2 micro=4 zero=1"), world);
// Collective: by every rank of the world.
#pragma once

#include "yoke/parallel/pipeline.h"
#include "yoke/parallel/tensor_axis.h"
#include "yoke/plan/plan.h"

namespace torch::nn {
class SequentialImpl;
}

namespace yoke::parallel {

// Throws Kind::Config with the numbers where the plan does not fit, or a pattern no layer.
std::unique_ptr<Pipeline> parallelize(const std::vector<LayerFactory>& layers,
                                      const plan::Plan& plan, const comm::Communicator& world,
                                      const DataParallelOptions& data = {});
// Layers that are made for the axis, and cut already: models that know how (models/).
using LayersOnAxis = std::function<std::vector<LayerFactory>(const TensorAxis& axis)>;
std::unique_ptr<Pipeline> parallelize(const LayersOnAxis& layers, const plan::Plan& plan,
                                      const comm::Communicator& world,
                                      const DataParallelOptions& data = {});
// Every module of the sequence is a layer; torch::nn::Linear, Embedding and LayerNorm become ours.
// With plan.sequence the first gets its tokens out of all, and the last one's are put together.
// What is trained are these layers, which are in Pipeline::data().units(), not the model.
std::unique_ptr<Pipeline> parallelize(torch::nn::SequentialImpl& model, const plan::Plan& plan,
                                      const comm::Communicator& world,
                                      const DataParallelOptions& data = {});

}  // namespace yoke::parallel
