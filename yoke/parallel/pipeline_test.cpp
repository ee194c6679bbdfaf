// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/pipeline_test.h"
#include "yoke/parallel/layer_costs.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <thread>

#include "yoke/plan/check.h"
#include "yoke/plan/passes.h"

namespace yoke::parallel {
namespace {

// A layer that lets a test see what is held and when things happen. Its weight is a number.
struct Probe : torch::nn::Module {
  struct Held : torch::CustomClassHolder {
    explicit Held(Probe& probe) : probe(probe) { probe.peak = std::max(probe.peak, ++probe.held); }
    ~Held() override { --probe.held; }
    Probe& probe;
  };
  struct Scale : torch::autograd::Function<Scale> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                              const at::Tensor& weight, Probe* probe) {
      context->save_for_backward({input, weight});
      context->saved_data["held"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(*probe));
      context->saved_data["probe"] = int64_t(reinterpret_cast<intptr_t>(probe));
      deferral_of(probe) = Deferral::current();
      return input * weight;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      const auto saved = context->get_saved_variables();
      auto* probe = reinterpret_cast<Probe*>(context->saved_data["probe"].toInt());
      const auto held = context->saved_data["held"].toCapsule();
      const at::Tensor input = saved[0], dy = gradients[0];
      const auto gradient = [=] {
        static_cast<void>(held);
        if (probe->on_weight) probe->on_weight();
        return (dy * input).sum().reshape({1});
      };
      const auto deferral = probe->deferrals.front();
      probe->deferrals.erase(probe->deferrals.begin());
      if (deferral) deferral->add(saved[1], gradient);
      return {dy * saved[1], deferral ? at::Tensor() : gradient(), {}};
    }
    static std::shared_ptr<Deferral>& deferral_of(Probe* probe) {
      return probe->deferrals.emplace_back();
    }
  };
  Probe() : weight(register_parameter("weight", at::ones({1}, at::kDouble))) {}
  at::Tensor forward(const at::Tensor& x) { return Scale::apply(x, weight, this); }

  at::Tensor weight;
  int held = 0, peak = 0;
  std::vector<std::shared_ptr<Deferral>> deferrals;  // micro-batches go through in order
  std::function<void()> on_weight;
};

}  // namespace

TEST(Pipeline, EveryScheduleEqualsOneDevice) {
  for (const std::string optimizer : {"sgd", "adamw"}) {
    const auto truth = alone(optimizer);
    for (const auto& name : plan::schedule_names())
      for (const int pp : {1, 2, 4}) {
        const bool doubled = name == "dualpipev" || name == "zb-h2" || name == "zb-auto";
        const Trial run{.schedule = name,
                        .pp = pp,
                        .micro = name == "layer" ? 1
                                 : doubled       ? 2 * pp
                                                 : 4,
                        .optimizer = optimizer};
        expect_equal(truth, together(run), cat(name, " ", pp, " ", optimizer));
      }
  }
}

TEST(Pipeline, EqualsOneDeviceWithReplicas) {
  const auto truth = alone("sgd");
  for (const std::string name : {"1f1b", "interleaved", "zb-h1", "zbv"})
    for (const int zero : {0, 1, 2, 3})
      expect_equal(truth, together({.schedule = name, .dp = 2, .zero = zero}),
                   cat(name, " ZeRO ", zero));
  // Micro-batches of unequal size, stages of unequal length, layers that cost unlike amounts.
  expect_equal(truth, together({.dp = 2, .micro = 3}), "uneven");
  expect_equal(truth, together({.options = {.layers_per_stage = {3, 14}}}), "by hand");
  std::vector<double> costs(kLayers, 1.0);
  costs.back() = 8;
  expect_equal(truth, together({.options = {.layer_cost = costs}}), "by cost");
  on_ranks(2, [&](Communicator& world) {
    const Pipeline pipeline(make_layers(),
                            plan::make_schedule("1f1b", {.ranks = 2, .micro_batches = 2}),
                            MeshGroups(world, {.pp = 2}), {.layer_cost = costs});
    EXPECT_EQ(pipeline.layers_per_stage(), (std::vector<int>{12, 5}));
  });
}

TEST(Pipeline, EvaluatesWithoutTraining) {
  for (const std::string name : {"1f1b", "zbv"})
    for (const int zero : {0, 3})
      on_ranks(2, [&](Communicator& world) {
        Pipeline pipeline(make_layers(),
                          plan::make_schedule(name, {.ranks = 2, .micro_batches = 4}),
                          MeshGroups(world, {.pp = 2}), {.data = {.zero = zero}});
        Sgd optimizer(pipeline.data(), {{.lr = 0.05}, 0.9});
        auto text = [&](int micro) { return tokens(0, 4 * micro, 4 * micro + 4); };
        const Pipeline::Batch batch{
            .input = [&](int micro) { return text(micro).narrow(1, 0, kTime); },
            .loss =
                [&](const at::Tensor& output, int micro) {
                  return Pipeline::Loss{loss_of(output, text(micro)), 4.0 * kTime};
                }};
        const auto before = pipeline.evaluate(batch), trained = pipeline.run(batch);
        optimizer.step();
        const auto after = pipeline.evaluate(batch);
        EXPECT_EQ(before.count, trained.count);
        if (!before.sum.defined()) return;
        EXPECT_TRUE(at::equal(before.sum, trained.sum));
        EXPECT_LT(after.sum.item<double>(), before.sum.item<double>());
      });
}

TEST(Pipeline, RunsSchedulesFromFilesAndComputesAgain) {
  const auto truth = alone("sgd");
  auto schedule = plan::make_schedule("zbv", {.ranks = 2, .micro_batches = 4});
  expect_equal(truth, together({.custom = plan::parse_csv(plan::to_csv(schedule))}), "read");
  schedule = plan::make_schedule("interleaved", {.ranks = 2, .micro_batches = 4});
  for (auto& row : schedule.rows)
    for (size_t i = row.size(); i-- > 0;)
      if (row[i].act == plan::Act::B)
        row.insert(row.begin() + long(i), {row[i].stage, plan::Act::Recompute, row[i].micro});
  expect_equal(truth, together({.custom = schedule}), "again");
}

// One action at a time is moved, dropped or doubled: either the schedule is refused, or it trains
// as well as any.
TEST(Pipeline, RefusesWhatItCannotRun) {
  const auto truth = alone("sgd");
  int refused = 0, ran = 0;
  for (uint64_t trial = 0; trial < 60; ++trial) {
    const Rng rng(5, "mutation", trial);
    const std::string name = std::vector<std::string>{"1f1b", "zb-h1", "zbv"}[trial % 3];
    auto schedule = plan::add_reductions(
        plan::add_messages(plan::make_schedule(name, {.ranks = 2, .micro_batches = 4})));
    auto& row = schedule.rows[rng.below(0, 2)];
    const auto from = long(rng.below(1, row.size())), to = long(rng.below(2, row.size()));
    const auto moved = row[size_t(from)];
    switch (rng.below(3, 4)) {
      case 0:
        row.erase(row.begin() + from);
        break;
      case 1:
        std::swap(row[size_t(from)], row[size_t(to)]);
        break;
      default:
        row.erase(row.begin() + from);
        row.insert(row.begin() + std::min(to, long(row.size())), moved);
    }
    if (plan::find_flaw(schedule)) {
      ++refused;
      EXPECT_THROW(together({.custom = schedule}), Error);
    } else {
      ++ran;
      expect_equal(truth, together({.custom = schedule}), cat("trial ", trial));
    }
  }
  EXPECT_GT(refused, 10);
  EXPECT_GT(ran, 3);
}

// Whatever the generators make, the executor runs.
TEST(Pipeline, RunsWhateverIsAllowed) {
  const auto truth = alone("sgd");
  int ran = 0;
  for (uint64_t trial = 0; ran < 30; ++trial) {
    const Rng rng(9, "shape", trial);
    const auto& names = plan::schedule_names();
    plan::ScheduleShape shape{.ranks = 1 + int(rng.below(0, 5)),
                              .micro_batches = 1 + int(rng.below(1, 12)),
                              .chunks = 1 + int(rng.below(2, 3))};
    shape.limits.costs.times = {0.5 + rng.uniform(3), 0.5 + rng.uniform(4), 0.5 + rng.uniform(5),
                                rng.uniform(6)};
    const std::string name = names[rng.below(7, names.size())];
    plan::Schedule schedule;
    try {
      schedule = plan::make_schedule(name, shape);
    } catch (const Error&) {
      continue;  // its rule does not allow it
    }
    if (schedule.num_stages() > kLayers) continue;
    ++ran;
    expect_equal(truth,
                 together({.pp = shape.ranks, .micro = shape.micro_batches, .custom = schedule}),
                 cat(name, " ", shape.ranks, " ", shape.micro_batches, " ", shape.chunks));
  }
}

TEST(Pipeline, MeasuresWhatLayersCost) {
  std::vector<LayerFactory> layers;
  for (const int ms : {2, 30, 2})
    layers.push_back([ms] {
      return Layer{nullptr, [ms](const at::Tensor& x) {
                     std::this_thread::sleep_for(std::chrono::milliseconds(ms));
                     return x * 2;
                   }};
    });
  const auto costs = measure_costs(layers, at::ones({2}));
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_GT(costs[1], 4 * costs[0]);
  EXPECT_GT(costs[1], 4 * costs[2]);
}

TEST(Pipeline, HoldsNoMoreThanTheSimulatorSays) {
  for (const std::string name : {"gpipe", "1f1b", "zb-h1", "zb-h2"}) {
    constexpr int kRanks = 4, kMicro = 8;
    const auto schedule = plan::make_schedule(name, {.ranks = kRanks, .micro_batches = kMicro});
    const auto predicted = plan::simulate(schedule)->peak;
    comm::run_ranks(kRanks, [&](Communicator& world) {
      std::shared_ptr<Probe> mine;
      const LayerFactory factory = [&] { return layer(mine = std::make_shared<Probe>()); };
      Pipeline pipeline({factory, factory, factory, factory}, schedule,
                        MeshGroups(world, {.pp = kRanks}));
      for (int step = 0; step < 2; ++step) {
        pipeline.run({.input = [](int micro) { return at::full({3}, 1.0 + micro, at::kDouble); },
                      .loss =
                          [](const at::Tensor& y, int) {
                            return Pipeline::Loss{y.sum(), 3};
                          }});
        pipeline.data().abandon_passes();  // in place of an optimizer
      }
      EXPECT_EQ(mine->peak, predicted[size_t(world.rank())]) << name << " on rank " << world.rank();
      EXPECT_EQ(mine->held, 0);
    });
  }
}

// Gradients of a stage travel while weights of another are computed.
TEST(Pipeline, OverlapsReductionsWithWeightGradients) {
  for (const std::string name : {"1f1b", "zbv"}) {
    std::vector<std::vector<std::string>> events(4);  // by rank, which alone writes its own
    comm::RunOptions run;
    run.world.before_issue = [&](int rank, comm::OpKind kind) {
      if (kind == comm::OpKind::AllReduce) events[size_t(rank)].push_back("reduce");
    };
    comm::run_ranks(
        4,
        [&](Communicator& world) {
          std::vector<LayerFactory> layers(8, [&] {
            const auto probe = std::make_shared<Probe>();
            probe->on_weight = [&] { events[size_t(world.rank())].push_back("weight"); };
            return layer(probe);
          });
          Pipeline pipeline(layers, plan::make_schedule(name, {.ranks = 2, .micro_batches = 4}),
                            MeshGroups(world, {.pp = 2, .dp = 2}),
                            {.data = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
          events[size_t(world.rank())].clear();
          pipeline.run({.input = [](int) { return at::ones({3}, at::kDouble); },
                        .loss =
                            [](const at::Tensor& y, int) {
                              return Pipeline::Loss{y.sum(), 3};
                            }});
        },
        run);
    for (const auto& seen : events) {
      const auto first = std::ranges::find(seen, "reduce");
      EXPECT_EQ(std::ranges::count(seen, "reduce"), 4) << name;
      EXPECT_GT(std::count(first, seen.end(), "weight"), 0) << name;
    }
  }
}

TEST(Pipeline, TellsWhatIsWrongAndWhere) {
  auto failure = [](const std::function<void(Communicator&, Pipeline&, Pipeline::Batch&)>& spoil,
                    const PipelineOptions& options = {}, int micro = 2) {
    return failure_of(2, [&](Communicator& world) {
      Pipeline pipeline(make_layers(),
                        plan::make_schedule("1f1b", {.ranks = 2, .micro_batches = micro}),
                        MeshGroups(world, {.pp = 2}), options);
      Pipeline::Batch batch{.input = [](int) { return tokens(0, 0, 2).narrow(1, 0, kTime); },
                            .loss =
                                [](const at::Tensor& y, int) {
                                  return Pipeline::Loss{y.sum(), 1};
                                }};
      pipeline.run(batch);
      pipeline.data().abandon_passes();  // in place of an optimizer
      spoil(world, pipeline, batch);
      pipeline.run(batch);
    });
  };
  EXPECT_TRUE(has(failure([](auto&, auto&, auto& batch) {
                    batch.input = [](int) { return tokens(0, 0, 3).narrow(1, 0, kTime); };
                  }),
                  "stage 0, 0F0: it gives Double[3, 5, 12], and gave Double[2, 5, 12]"));
  const auto thrown = failure([](auto&, auto&, auto& batch) {
    batch.loss = [](const at::Tensor&, int) -> Pipeline::Loss { throw std::runtime_error("oh"); };
  });
  EXPECT_TRUE(has(thrown, "stage 1, 1F0: oh")) << thrown;
  EXPECT_TRUE(has(failure([](auto&, auto&, auto& batch) {
                    batch.loss = [](const at::Tensor& y, int) { return Pipeline::Loss{y, 1}; };
                  }),
                  "the loss wants a sum of one element"));
  EXPECT_TRUE(has(failure([](auto&, auto&, auto& batch) {
                    batch.loss = [](const at::Tensor& y, int) {
                      return Pipeline::Loss{y.detach().sum(), 1};
                    };
                  }),
                  "stage 1, 1F0: the loss has no gradient"));
  const auto apart = failure_of(2, [](Communicator& world) {
    Pipeline(make_layers(), plan::make_schedule("1f1b", {.ranks = 2, .micro_batches = 2}),
             MeshGroups(world, {.pp = 2}),
             {.layers_per_stage = {5 + world.rank(), 12 - world.rank()}});
  });
  EXPECT_TRUE(has(apart, "the ranks do not agree on the stages")) << apart;
  EXPECT_TRUE(has(failure([](auto&...) {}, {.layers_per_stage = {3, 13}}),
                  "2 numbers from 1 on that add up to 17 layers, got 2 that add up to 16"));
  EXPECT_TRUE(has(failure_of(2, [](Communicator& world) { MeshGroups(world, {.pp = 2, .tp = 2}); }),
                  "pp=2 x dp=1 x tp=2 = 4, but there are 2 ranks"));
}

// The head is on the rank of the embedding (one rank, and the V of zbv), or on another.
TEST(Pipeline, TiesWeightsAcrossStages) {
  const auto truth = alone("sgd", true);
  const PipelineOptions tied{.ties = {{kEmbedding, kHead}}};
  for (const std::string name : {"1f1b", "zb-h1", "zbv"})
    for (const int pp : {1, 2, 4})
      for (const int zero : {0, 1, 2, 3}) {
        const Trial run{
            .schedule = name, .pp = pp, .dp = pp > 2 ? 1 : 2, .zero = zero, .options = tied};
        const auto outcome = together(run);
        expect_equal(truth, outcome, cat(name, " ", pp, " ZeRO ", zero));
        EXPECT_TRUE(at::equal(outcome.parameters.at(kEmbedding), outcome.parameters.at(kHead)));
      }
  EXPECT_TRUE(has(
      failure_of(2,
                 [](Communicator& world) {
                   Pipeline(make_layers(),
                            plan::make_schedule("1f1b", {.ranks = 2, .micro_batches = 2}),
                            MeshGroups(world, {.pp = 2}), {.ties = {{kEmbedding, "17.weight"}}});
                 }),
      "of the 2 parameters '0.weight', '17.weight' that are to be tied there are 1"));
}

}  // namespace yoke::parallel
