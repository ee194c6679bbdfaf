// SPDX-License-Identifier: Apache-2.0
// Pipelines with fewer bits, with parameters that are frozen or not used, computed again, and at
// odds with the caller.
#include <gtest/gtest.h>

#include "yoke/parallel/pipeline_test.h"
#include "yoke/plan/passes.h"

namespace yoke::parallel {
namespace {

Pipeline::Batch batch_of(int step, int micro_batches) {
  auto text = [=](int micro) {
    const int64_t count = kSamples / micro_batches;
    return tokens(step, micro * count, (micro + 1) * count);
  };
  return {.input = [=](int micro) { return text(micro).narrow(1, 0, kTime); },
          .loss =
              [=](const at::Tensor& output, int micro) {
                const at::Tensor target = text(micro);
                return Pipeline::Loss{loss_of(output.to(at::kDouble), target),
                                      double(target.size(0) * kTime)};
              }};
}

// Losses and norms of some steps.
Outcome train(const std::string& schedule, int pp, const PipelineOptions& options,
              const std::vector<LayerFactory>& layers) {
  constexpr int kMicro = 4;
  Outcome outcome;
  on_ranks(pp, [&](Communicator& world) {
    Pipeline pipeline(layers, plan::make_schedule(schedule, {.ranks = pp, .micro_batches = kMicro}),
                      MeshGroups(world, {.pp = pp}), options);
    const auto optimizer = make_optimizer("sgd", pipeline.data());
    for (int step = 0; step < kSteps; ++step) {
      const auto loss = pipeline.run(batch_of(step, kMicro));
      const double norm = optimizer->step().grad_norm();
      const at::Tensor sum = at::zeros({1}, at::device(test_device()).dtype(at::kDouble));
      if (loss.sum.defined()) sum.add_(loss.sum);
      world.all_reduce(sum).wait();
      if (world.rank() + 1 < pp) continue;  // the last has parameters that are trained
      outcome.losses.push_back(sum.item<double>() / double(kSamples * kTime));
      outcome.norms.push_back(norm);
    }
    pipeline.data().gathered([&] {
      if (world.rank() + 1 == pp)
        for (const auto& part : pipeline.data().units())
          for (const auto& item : part->named_parameters())
            outcome.parameters[item.key()] = item.value().detach().clone();
    });
  });
  return outcome;
}

}  // namespace

// Stages in few bits are what one stage in few bits is, with backward in halves or not.
TEST(PipelineModes, FewBits) {
  for (const auto precision : {Precision::Bf16, Precision::Fp16})
    for (const int zero : {0, 2}) {
      const PipelineOptions options{
          .data = {.zero = zero, .precision = precision, .loss_scale = 256}};
      const auto one = train("gpipe", 1, options, make_layers(at::kFloat));
      const auto exact = train("gpipe", 1, {}, make_layers(at::kFloat));
      for (const std::string name : {"1f1b", "zb-h1", "zbv"}) {
        const auto two = train(name, 2, options, make_layers(at::kFloat));
        for (size_t i = 0; i < one.losses.size(); ++i) {
          EXPECT_NEAR(two.losses[i], one.losses[i], 1e-2) << name;
          EXPECT_NEAR(two.norms[i], one.norms[i], 2e-2 * one.norms[i]) << name;
          EXPECT_NEAR(two.losses[i], exact.losses[i], 3e-2) << name;
        }
        EXPECT_EQ(two.parameters.begin()->second.scalar_type(),
                  precision == Precision::Bf16 ? at::kBFloat16 : at::kHalf);
      }
    }
}

// Under ZeRO 3 one stage has never all of its parameters at once, and the result is the same.
TEST(PipelineModes, OneStageIsGatheredLayerByLayer) {
  for (const std::string name : {"1f1b", "gpipe", "zb-h1"}) {
    std::vector<double> norms[2];
    for (const int zero : {0, 3})
      on_ranks(2, [&](Communicator& world) {
        constexpr int kMicro = 2;
        Pipeline pipeline(make_layers(),
                          plan::make_schedule(name, {.ranks = 1, .micro_batches = kMicro}),
                          MeshGroups(world, {.dp = 2}),
                          {.data = {.zero = zero, .bucket_bytes = 4096, .first_bucket_bytes = 64}});
        const auto optimizer = make_optimizer("sgd", pipeline.data());
        for (int step = 0; step < kSteps; ++step) {
          pipeline.run(batch_of(step, kMicro));
          const double norm = optimizer->step().grad_norm();
          pipeline.evaluate(batch_of(step, kMicro));
          if (world.rank() == 0) norms[zero / 3].push_back(norm);
        }
        const auto memory = pipeline.data().memory();
        const int64_t all = pipeline.data().layout().num_elements() * int64_t(sizeof(double));
        if (zero == 3 && name != "zb-h1") {  // whose halves have the gradients of all layers open
          EXPECT_LT(memory.pool, all / 2) << name;
        }
      });
    for (size_t i = 0; i < norms[0].size(); ++i)
      EXPECT_NEAR(norms[0][i], norms[1][i], 1e-11 * norms[0][i]) << name;
  }
}

// A stage with nothing to be trained, a layer without gradients, and a parameter nobody uses.
TEST(PipelineModes, FrozenAndUnusedParameters) {
  auto layers = make_layers();
  for (size_t place = 0; place < layers.size(); ++place) {
    layers[place] = [=, plain = layers[place]] {
      Layer layer = plain();
      if (place <= 8 || place == 12)
        for (auto& parameter : layer.module->parameters()) parameter.set_requires_grad(false);
      if (place == 14)
        layer.module->register_parameter(
            "idle", at::ones({3}, at::device(test_device()).dtype(at::kDouble)));
      return layer;
    };
  }
  const auto one = train("gpipe", 1, {}, layers);
  for (const std::string name : {"1f1b", "zb-h1", "zbv"})
    for (const int pp : {2, 4})
      for (const int zero : {0, 1, 3}) {
        const auto many = train(name, pp, {.data = {.zero = zero}}, layers);
        for (size_t i = 0; i < one.losses.size(); ++i) {
          EXPECT_NEAR(many.losses[i], one.losses[i], 1e-11) << name << " " << pp;
          EXPECT_NEAR(many.norms[i], one.norms[i], 1e-11) << name << " " << pp;
        }
      }
}

// What is computed again puts off its weight gradients as the first time.
TEST(PipelineModes, ComputesAgainBeforeHalvesOfBackward) {
  const auto truth = alone("sgd");
  for (const std::string name : {"zb-h1", "zbv"}) {
    auto schedule = plan::make_schedule(name, {.ranks = 2, .micro_batches = 4});
    for (auto& row : schedule.rows)
      for (size_t i = row.size(); i-- > 0;)
        if (row[i].act == plan::Act::I || row[i].act == plan::Act::B)
          row.insert(row.begin() + long(i), {row[i].stage, plan::Act::Recompute, row[i].micro});
    expect_equal(truth, together({.custom = schedule}), name);
  }
}

TEST(PipelineModes, OneRunIsOneStep) {
  for (const int zero : {0, 2}) {
    const auto text = failure_of(2, [&](Communicator& world) {
      Pipeline pipeline(make_layers(),
                        plan::make_schedule("1f1b", {.ranks = 2, .micro_batches = 4}),
                        MeshGroups(world, {.pp = 2}), {.data = {.zero = zero}});
      const auto optimizer = make_optimizer("sgd", pipeline.data());
      pipeline.run(batch_of(0, 4));
      pipeline.evaluate(batch_of(0, 4));
      pipeline.run(batch_of(1, 4));
    });
    EXPECT_TRUE(has(text, "run() again before the optimizer's step")) << text;
  }
}

TEST(PipelineModes, OneRankThatCannotBuildEndsAll) {
  const auto text = failure_of(4, [](Communicator& world) {
    auto layers = make_layers();
    layers[9] = []() -> Layer { throw std::runtime_error("no such file"); };
    Pipeline(layers, plan::make_schedule("1f1b", {.ranks = 2, .micro_batches = 4}),
             MeshGroups(world, {.pp = 2, .dp = 2}));
  });
  EXPECT_TRUE(has(text, "no such file")) << text;
}

TEST(PipelineModes, TiesUnderTensorParallelismWantParts) {
  const auto text = failure_of(2, [](Communicator& world) {
    Pipeline(make_layers(), plan::make_schedule("1f1b", {.ranks = 1, .micro_batches = 2}),
             MeshGroups(world, {.tp = 2}), {.ties = {{kEmbedding, kHead}}});
  });
  EXPECT_TRUE(has(text, "'0.weight' is tied, and not split over the 2 ranks of a layer")) << text;
}

// What ranks of a layer, and stages, have in common is compared as replicas are.
TEST(PipelineModes, NoticesSharedParametersThatDiffer) {
  for (const MeshShape shape : {MeshShape{.pp = 2}, MeshShape{.tp = 2}}) {
    const auto text = failure_of(2, [&](Communicator& world) {
      PipelineOptions options;
      if (shape.pp == 2) options.ties = {{kEmbedding, kHead}};
      Pipeline pipeline(make_layers(),
                        plan::make_schedule("1f1b", {.ranks = shape.pp, .micro_batches = 2}),
                        MeshGroups(world, shape), options);
      pipeline.data().check_replicas();
      const at::NoGradGuard no_grad;
      for (const auto& part : pipeline.data().units())
        for (auto& item : part->named_parameters())
          if (world.rank() == 1 && (item.key() == kHead || item.key() == kEmbedding))
            item.value().add_(1);
      pipeline.data().check_replicas();
    });
    EXPECT_TRUE(has(text, "the replicas have diverged")) << text;
    EXPECT_TRUE(has(text, "another '0.weight'")) << text;
  }
}

}  // namespace yoke::parallel
