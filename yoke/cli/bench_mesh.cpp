// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_mesh.h"

#include <ATen/Functions.h>
#include <sys/prctl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/attention.h"
#include "yoke/parallel/cross_entropy.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/parallel/pipeline.h"
#include "yoke/plan/generate.h"

namespace yoke::cli {
namespace {

using parallel::Deferral;
using parallel::TensorAxis;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// To the microsecond: a sleeping thread wakes late, by less than kLate.
void sleep_ms(double ms) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLate = std::chrono::microseconds(150);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double, std::milli>(ms));
  if (end - Clock::now() > kLate) std::this_thread::sleep_until(end - kLate);
  while (Clock::now() < end) std::this_thread::yield();
}

struct Sleeps : torch::CustomClassHolder {
  plan::Times times = {};
  std::shared_ptr<Deferral> deferral = nullptr;
};

struct Sleeper : torch::autograd::Function<Sleeper> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const c10::intrusive_ptr<Sleeps>& sleeps) {
    context->save_for_backward({weight});
    context->saved_data["sleeps"] = c10::IValue::make_capsule(sleeps);
    sleep_ms(sleeps->times.f);
    return input.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto sleeps =
        c10::static_intrusive_pointer_cast<Sleeps>(context->saved_data["sleeps"].toCapsule());
    const auto weight = [like = context->get_saved_variables()[0], ms = sleeps->times.w] {
      sleep_ms(ms);
      return at::zeros_like(like);
    };
    sleep_ms(sleeps->times.i);
    if (!sleeps->deferral) return {gradients[0], weight(), {}};
    sleeps->deferral->add(context->get_saved_variables()[0], weight);
    return {gradients[0], {}, {}};
  }
};

struct SleepingLayer : torch::nn::Module {
  explicit SleepingLayer(plan::Times times)
      : times(times), weight(register_parameter("weight", at::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& input) const {
    auto sleeps = c10::make_intrusive<Sleeps>();
    sleeps->times = times;
    sleeps->deferral = Deferral::current();
    return Sleeper::apply(input, weight, sleeps);
  }
  const plan::Times times;
  at::Tensor weight;
};

// The gpt of bench/peers/data_models.py.
constexpr int64_t kWords = 1024, kTime = 256, kDim = 256, kHeads = 4;

struct Start : torch::nn::Module {
  explicit Start(const TensorAxis& axis)
      : axis(axis),
        words(register_module("words", parallel::Embedding(kWords, kDim))),
        positions(register_parameter("positions", 0.02 * at::randn({kTime, kDim}))) {
    const at::NoGradGuard no_grad;
    words->weight.mul_(0.02);
    words->split_words(axis);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const int64_t count = axis.scatters() ? axis.part_of(kTime, "tokens") : kTime;
    return words(tokens) + positions.narrow(0, axis.scatters() ? axis.rank() * count : 0, count);
  }
  const TensorAxis axis;
  parallel::Embedding words;
  at::Tensor positions;
};

torch::nn::LayerNormOptions norm_options() { return torch::nn::LayerNormOptions({kDim}); }

struct Block : torch::nn::Module {
  explicit Block(const TensorAxis& axis)
      : norm1(register_module("norm1", parallel::LayerNorm(norm_options()))),
        attention(register_module("attention", parallel::Attention(parallel::AttentionOptions{
                                                   .dim = kDim, .heads = kHeads}))),
        norm2(register_module("norm2", parallel::LayerNorm(norm_options()))),
        up(register_module("up", parallel::Linear(kDim, 4 * kDim))),
        down(register_module("down", parallel::Linear(4 * kDim, kDim))) {
    attention->split_heads(axis);
    up->split_outputs(axis);
    down->split_inputs(axis);
  }
  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1(x));
    return x + down(at::gelu(up(norm2(x))));
  }
  parallel::LayerNorm norm1;
  parallel::Attention attention;
  parallel::LayerNorm norm2;
  parallel::Linear up, down;
};

struct End : torch::nn::Module {
  explicit End(const TensorAxis& axis)
      : norm(register_module("norm", parallel::LayerNorm(norm_options()))),
        head(register_module(
            "head", parallel::Linear(torch::nn::LinearOptions(kDim, kWords).bias(false)))) {
    head->split_outputs(axis);
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }
  parallel::LayerNorm norm;
  parallel::Linear head;
};

std::vector<parallel::LayerFactory> gpt_layers(int blocks, const TensorAxis& axis) {
  std::vector<parallel::LayerFactory> layers;
  layers.push_back([axis] { return parallel::layer(std::make_shared<Start>(axis)); });
  for (int i = 0; i < blocks; ++i)
    layers.push_back([axis] { return parallel::layer(std::make_shared<Block>(axis)); });
  layers.push_back([axis] { return parallel::layer(std::make_shared<End>(axis)); });
  return layers;
}

// As the peer cuts them: equal blocks, with the embedding in the first stage and the head in the
// last.
std::vector<int> even_blocks(int blocks, int stages) {
  if (blocks % stages != 0)
    fail(Kind::Usage, blocks, " blocks cannot be cut evenly into ", stages, " stages");
  std::vector<int> result(static_cast<size_t>(stages), blocks / stages);
  ++result.front();
  ++result.back();
  return result;
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& tokens, const TensorAxis& axis) {
  const at::Tensor rows = logits.reshape({-1, logits.size(-1)}),
                   targets = tokens.narrow(1, 1, kTime).reshape({-1});
  return axis.size() > 1 ? parallel::cross_entropy_sum(rows, targets, axis)
                         : at::cross_entropy_loss(rows, targets, {}, at::Reduction::Sum);
}

class OurPipeline final : public PipelineTrainer {
 public:
  static constexpr int kBlocks = 8;
  explicit OurPipeline(const PipelineBench& bench)
      : bench_(bench),
        schedule_(plan::make_schedule(
            bench.schedule, {.ranks = bench.ranks, .micro_batches = bench.micro_batches})) {
    measured_.rows.resize(size_t(bench.ranks));
  }

  double round(int steps) override {
    double seconds = 0;
    comm::run_ranks(bench_.ranks,
                    [&](comm::Communicator& world) {
                      const parallel::MeshGroups mesh(world, {.pp = bench_.ranks});
                      parallel::Pipeline pipeline(
                          gpt_layers(kBlocks, {}), schedule_, mesh,
                          {.layers_per_stage = even_blocks(kBlocks, schedule_.num_stages())});
                      parallel::AdamW optimizer(pipeline.data(),
                                                {{.lr = 1e-4, .weight_decay = 0.01}});
                      std::vector<at::Tensor> tokens;
                      for (int micro = 0; micro < bench_.micro_batches; ++micro)
                        tokens.push_back(at::randint(kWords, {1, kTime + 1}, at::kLong));
                      for (const auto& text : tokens) world.broadcast(text, 0).wait();
                      const parallel::Pipeline::Batch batch{
                          .input = [&](int m) { return tokens[size_t(m)].narrow(1, 0, kTime); },
                          .loss =
                              [&](const at::Tensor& output, int m) {
                                return parallel::Pipeline::Loss{
                                    loss_of(output, tokens[size_t(m)], {}), double(kTime)};
                              }};
                      const double mine = time_steps(world, at::kCPU, steps, [&] {
                        pipeline.run(batch);
                        optimizer.step();
                      });
                      auto& row = measured_.rows[size_t(world.rank())];
                      row = pipeline.times();
                      for (auto& [action, begin, end] : row) begin *= 1e3, end *= 1e3;
                      if (world.rank() == 0) seconds = mine;
                    },
                    {.threads_per_rank = 1});
    measured_.makespan = 0;
    for (const auto& row : measured_.rows)
      measured_.makespan = std::max(measured_.makespan, row.back().end);
    return seconds;
  }
  const plan::Simulation& measured() const override { return measured_; }
  const plan::Schedule& schedule() const override { return schedule_; }

 private:
  const PipelineBench bench_;
  const plan::Schedule schedule_;
  plan::Simulation measured_;
};

class OurTensor final : public Trainer {
 public:
  static constexpr int kBlocks = 4, kBatch = 4;
  OurTensor(int ranks, bool sequence) : ranks_(ranks), sequence_(sequence) {}

  double round(int steps) override {
    double seconds = 0;
    comm::run_ranks(ranks_,
                    [&](comm::Communicator& world) {
                      const parallel::MeshGroups mesh(world, {.tp = ranks_});
                      const TensorAxis axis{mesh.tp, sequence_};
                      parallel::Pipeline model(
                          gpt_layers(kBlocks, axis),
                          plan::make_schedule("layer", {.ranks = 1, .micro_batches = 1}), mesh,
                          {.sequence = sequence_});
                      parallel::AdamW optimizer(model.data(), {{.lr = 1e-4, .weight_decay = 0.01}});
                      const at::Tensor tokens = at::randint(kWords, {kBatch, kTime + 1}, at::kLong);
                      world.broadcast(tokens, 0).wait();
                      const parallel::Pipeline::Batch batch{
                          .input = [&](int) { return tokens.narrow(1, 0, kTime); },
                          .loss =
                              [&](const at::Tensor& output, int) {
                                return parallel::Pipeline::Loss{loss_of(output, tokens, axis),
                                                                double(kBatch * kTime)};
                              }};
                      const double mine = time_steps(world, at::kCPU, steps, [&] {
                        model.run(batch);
                        optimizer.step();
                      });
                      if (world.rank() == 0) seconds = mine;
                    },
                    {.threads_per_rank = 1});
    return seconds;
  }

 private:
  const int ranks_;
  const bool sequence_;
};

}  // namespace

double run_stand_in(const StandIn& stand_in, int steps) {
  const auto& schedule = stand_in.schedule;
  const double share = schedule.chunks();
  const plan::Times each{stand_in.times.f / share, stand_in.times.i / share,
                         stand_in.times.w / share};
  double least = 0;
  comm::run_ranks(
      schedule.num_ranks(),
      [&](comm::Communicator& world) {
        ::prctl(PR_SET_TIMERSLACK, 1);  // wakes when it is told to
        std::vector<parallel::LayerFactory> layers(size_t(schedule.num_stages()), [&] {
          return parallel::layer(std::make_shared<SleepingLayer>(each));
        });
        parallel::Pipeline pipeline(layers, schedule,
                                    parallel::MeshGroups(world, {.pp = schedule.num_ranks()}));
        parallel::Sgd optimizer(pipeline.data());
        const parallel::Pipeline::Batch batch{.input = [](int) { return at::zeros({1}); },
                                              .loss =
                                                  [](const at::Tensor& x, int) {
                                                    return parallel::Pipeline::Loss{x.sum(), 1};
                                                  }};
        for (int step = 0; step <= steps; ++step) {  // the first one learns the shapes
          world.barrier();
          const auto start = std::chrono::steady_clock::now();
          pipeline.run(batch);
          world.barrier();
          const std::chrono::duration<double, std::milli> took =
              std::chrono::steady_clock::now() - start;
          optimizer.step();
          if (world.rank() == 0 && (step == 1 || (step > 1 && took.count() < least)))
            least = took.count();
        }
      },
      {.threads_per_rank = 1});
  return least;
}

std::unique_ptr<PipelineTrainer> make_pipeline_trainer(const PipelineBench& bench) {
  return std::make_unique<OurPipeline>(bench);
}

plan::Costs costs_of(const plan::Schedule& schedule, const plan::Simulation& measured) {
  // All of a stage's work of a kind; what is left of a whole backward is half I and half W.
  std::vector<std::map<plan::Act, double>> sums(schedule.rank_of.size());
  for (const auto& row : measured.rows)
    for (const auto& [action, begin, end] : row)
      if (action.computes()) sums[size_t(action.stage)][action.act] += end - begin;
  plan::Costs costs{.times = {0, 0, 0, 0}};
  double mean = 0;
  const double micro = schedule.num_micro, ranks = schedule.num_ranks();
  for (auto& stage : sums) {
    const double both = stage[plan::Act::B] / 2;
    const double f = stage[plan::Act::F] / micro, i = (stage[plan::Act::I] + both) / micro,
                 w = (stage[plan::Act::W] + both) / micro;
    costs.stage_weight.push_back(f + i + w);
    mean += (f + i + w) / double(sums.size());
    // Times are of a rank's share: of all its stages.
    costs.times.f += f / ranks, costs.times.i += i / ranks, costs.times.w += w / ranks;
  }
  for (auto& weight : costs.stage_weight) weight /= mean;
  return costs;
}

std::unique_ptr<Trainer> make_tensor_trainer(int ranks, bool sequence) {
  return std::make_unique<OurTensor>(ranks, sequence);
}

}  // namespace yoke::cli
