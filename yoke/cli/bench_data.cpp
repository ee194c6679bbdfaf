// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_data.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/nn.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/comm/nccl/backend.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/optimizer.h"

namespace yoke::cli {
namespace {

namespace nn = torch::nn;
using SteadyTime = std::chrono::steady_clock;

// The same models as in bench/peers/data_models.py.
struct BenchModel : nn::Module {
  virtual at::Tensor loss_sum() = 0;         // of a batch made once
  virtual void move(at::Device device) = 0;  // the batch
  double count = 0;
};

struct Block : nn::Module {
  Block(int64_t dim, int64_t heads)
      : heads(heads),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        qkv(register_module("qkv", nn::Linear(dim, 3 * dim))),
        out(register_module("out", nn::Linear(dim, dim))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        up(register_module("up", nn::Linear(dim, 4 * dim))),
        down(register_module("down", nn::Linear(4 * dim, dim))) {}
  at::Tensor forward(at::Tensor x) {
    const int64_t batch = x.size(0), time = x.size(1), dim = x.size(2);
    const auto parts = qkv(norm1(x)).view({batch, time, 3, heads, dim / heads}).unbind(2);
    const at::Tensor y = at::scaled_dot_product_attention(
        parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), {}, 0,
        /*is_causal=*/true);
    x = x + out(y.transpose(1, 2).reshape({batch, time, dim}));
    return x + down(at::gelu(up(norm2(x))));
  }
  int64_t heads;
  nn::LayerNorm norm1{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr};
  nn::LayerNorm norm2{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};

struct GptSizes {
  int64_t vocab, time, dim, heads, blocks, batch;
};
constexpr GptSizes kGpt{
    .vocab = 1024, .time = 256, .dim = 256, .heads = 4, .blocks = 4, .batch = 4};
constexpr GptSizes kGpt2{
    .vocab = 50304, .time = 1024, .dim = 768, .heads = 12, .blocks = 12, .batch = 16};

struct Gpt : BenchModel {
  explicit Gpt(const GptSizes& sizes)
      : sizes(sizes),
        embedding(register_module("embedding", nn::Embedding(sizes.vocab, sizes.dim))),
        position(register_module("position", nn::Embedding(sizes.time, sizes.dim))) {
    for (int i = 0; i < sizes.blocks; ++i)
      blocks.push_back(
          register_module(cat("block", i), std::make_shared<Block>(sizes.dim, sizes.heads)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({sizes.dim})));
    const at::NoGradGuard no_grad;
    embedding->weight.mul_(0.02), position->weight.mul_(0.02);
    tokens = at::randint(sizes.vocab, {sizes.batch, sizes.time + 1}, at::kLong);
    count = double(sizes.batch * sizes.time);
  }
  at::Tensor loss_sum() override {
    at::Tensor x = embedding(tokens.narrow(1, 0, sizes.time)) + position->weight;
    for (const auto& block : blocks) x = block->forward(x);
    const at::Tensor logits = at::linear(norm(x), embedding->weight);
    return at::cross_entropy_loss(logits.view({-1, sizes.vocab}),
                                  tokens.narrow(1, 1, sizes.time).reshape({-1}), {},
                                  at::Reduction::Sum);
  }
  void move(at::Device device) override { tokens = tokens.to(device); }
  const GptSizes sizes;
  nn::Embedding embedding, position;
  std::vector<std::shared_ptr<Block>> blocks;
  nn::LayerNorm norm{nullptr};
  at::Tensor tokens;
};

struct Mlp : BenchModel {
  static constexpr int64_t kWidth = 1024, kBatch = 4;
  Mlp() : input(at::randn({kBatch, kWidth})), target(at::randn({kBatch, kWidth})) {
    for (int i = 0; i < 16; ++i)
      layers.push_back(register_module(cat("layer", i), nn::Linear(kWidth, kWidth)));
    count = kBatch;
  }
  at::Tensor loss_sum() override {
    at::Tensor x = input;
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i](i == 0 ? x : at::relu(x));
    return (x - target).square().sum();
  }
  void move(at::Device device) override { input = input.to(device), target = target.to(device); }
  std::vector<nn::Linear> layers;
  at::Tensor input, target;
};

std::shared_ptr<BenchModel> make_model(const BenchData& bench, bool in_float32) {
  const at::Device device(bench.device);
  std::shared_ptr<BenchModel> model;
  if (bench.model == "mlp")
    model = std::make_shared<Mlp>();
  else
    model = std::make_shared<Gpt>(bench.model == "gpt2" ? kGpt2 : kGpt);
  model->to(device, bench.model == "gpt2" && !in_float32 ? at::kBFloat16 : at::kFloat);
  model->move(device);
  return model;
}

constexpr double kLr = 1e-4, kDecay = 0.01;
constexpr int kWarmUp = 3;

void synchronise(at::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

class OurTrainer final : public Trainer {
 public:
  // Without a stage: without the wrapper.
  OurTrainer(BenchData bench, std::optional<int> zero, parallel::Precision precision = {})
      : bench_(std::move(bench)), zero_(zero), precision_(precision) {}

  double round(int steps) override {
    double seconds = 0;
    std::mutex building;
    comm::RunOptions options{.threads_per_rank = 1};
    if (bench_.device != "cpu")
      options.devices.assign(size_t(bench_.ranks), topo::parse_devices(bench_.device).at(0));
    if (!bench_.nccl.empty())
      options.backend = comm::nccl_backend({.file = bench_.nccl == "auto" ? "" : bench_.nccl});
    comm::run_ranks(
        bench_.ranks,
        [&](comm::Communicator& comm) {
          std::unique_lock lock(building);
          auto& model = models_[comm.rank()];  // made once; only ZeRO 3 takes its weights along
          if (!model || model->parameters()[0].numel() == 0)
            model = make_model(bench_, precision_ != parallel::Precision::AsIs);
          lock.unlock();
          const double mine = zero_ ? under(comm, *model, steps) : bare(comm, *model, steps);
          if (comm.rank() == 0) seconds = mine;
        },
        options);
    return seconds;
  }

 private:
  double under(const comm::Communicator& comm, BenchModel& model, int steps) const {
    parallel::DataParallel dp(model, comm, {.zero = *zero_, .precision = precision_});
    parallel::AdamW optimizer(dp, {{.lr = kLr, .weight_decay = kDecay}});
    return time_steps(comm, at::Device(bench_.device), steps, [&] {
      dp.backward(model.loss_sum(), model.count);
      optimizer.step();
    });
  }
  // What a careful user would write without a library: the fused update over all parameters.
  double bare(const comm::Communicator& comm, BenchModel& model, int steps) const {
    std::vector<at::Tensor> weights = model.parameters(), first, second, counts;
    for (const auto& weight : weights) {
      first.push_back(at::zeros_like(weight));
      second.push_back(at::zeros_like(weight));
      counts.push_back(at::zeros({}, weight.options().dtype(at::kFloat)));
    }
    return time_steps(comm, at::Device(bench_.device), steps, [&] {
      torch::autograd::backward({model.loss_sum() / model.count}, {});
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> gradients;
      for (auto& weight : weights) gradients.push_back(weight.grad());
      at::_foreach_add_(counts, 1);
      at::_fused_adamw_(weights, gradients, first, second, {}, counts, kLr, 0.9, 0.999, kDecay,
                        1e-8, false, false);
      for (auto& weight : weights) weight.mutable_grad().reset();
    });
  }
  const BenchData bench_;
  std::map<int, std::shared_ptr<BenchModel>> models_;  // by rank
  const std::optional<int> zero_;
  const parallel::Precision precision_;
};

class Peer final : public Trainer {
 public:
  explicit Peer(const std::vector<std::string>& command) : process_(command) {
    process_.hear(std::chrono::minutes(3));  // ready
  }
  double round(int steps) override {
    process_.say(cat("run ", steps));
    const std::string line = process_.hear(std::chrono::minutes(10));
    const std::string mark = "\"seconds\": ";
    const size_t at = line.find(mark);
    if (at == std::string::npos) fail(Kind::Internal, "a peer said '", line, "'");
    return std::stod(line.substr(at + mark.size()));
  }

 private:
  Conversation process_;
};

}  // namespace

double time_steps(const comm::Communicator& world, at::Device device, int steps,
                  const std::function<void()>& step) {
  for (int i = 0; i < kWarmUp; ++i) step();
  synchronise(device);
  world.barrier();
  const auto start = SteadyTime::now();
  for (int i = 0; i < steps; ++i) step();
  synchronise(device);
  const at::Tensor seconds =
      at::full({}, std::chrono::duration<double>(SteadyTime::now() - start).count(), at::kDouble)
          .to(device);
  world.all_reduce(seconds, comm::ReduceOp::Max).wait();
  return seconds.item<double>();
}

std::unique_ptr<Trainer> make_peer(const std::string& program,
                                   const std::vector<std::string>& arguments) {
  std::vector<std::string> command{python_with_torch(), (peers_folder() / program).string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return std::make_unique<Peer>(command);
}

std::unique_ptr<Trainer> make_trainer(const std::string& name, const BenchData& bench) {
  BenchData one = bench;
  one.ranks = 1;
  if (name == "alone") return std::make_unique<OurTrainer>(one, std::nullopt);
  if (name == "one") return std::make_unique<OurTrainer>(one, 0);
  if (name == "bf16") return std::make_unique<OurTrainer>(one, 0, parallel::Precision::Bf16);
  if (name.starts_with("zero")) return std::make_unique<OurTrainer>(bench, name[4] - '0');
  return make_peer("data.py",
                   {"--peer", name == "torch" ? "alone" : name, "--model", bench.model, "--ranks",
                    cat(bench.ranks), "--threads", "1", "--device", bench.device});
}

StepLoad load_of(const std::string& model) {
  if (model == "mlp") return {.tokens = Mlp::kBatch};
  const GptSizes& sizes = model == "gpt2" ? kGpt2 : kGpt;
  const double tokens = double(sizes.batch * sizes.time), dim = double(sizes.dim),
               blocks = double(sizes.blocks);
  const double parameters = 12 * blocks * dim * dim + double(sizes.vocab) * dim;
  return {.tokens = tokens,
          .flops = tokens * (6 * parameters + 12 * blocks * dim * double(sizes.time))};
}

namespace {

using Interval = std::pair<int64_t, int64_t>;  // nanoseconds

std::vector<Interval> merged(std::vector<Interval> intervals) {
  std::ranges::sort(intervals);
  std::vector<Interval> result;
  for (const auto& [begin, end] : intervals)
    if (result.empty() || result.back().second < begin)
      result.emplace_back(begin, end);
    else
      result.back().second = std::max(result.back().second, end);
  return result;
}

double milliseconds(const std::vector<Interval>& intervals) {
  int64_t total = 0;
  for (const auto& [begin, end] : intervals) total += end - begin;
  return double(total) / 1e6;
}

std::vector<Interval> common(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::vector<Interval> result;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Interval both{std::max(a[i].first, b[j].first), std::min(a[i].second, b[j].second)};
    if (both.first < both.second) result.push_back(both);
    a[i].second < b[j].second ? ++i : ++j;
  }
  return result;
}

}  // namespace

Overlap trace_overlap(Trainer& trainer, int steps, const std::string& file) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<torch::profiler::impl::ActivityType> activities{
      torch::profiler::impl::ActivityType::CPU, torch::profiler::impl::ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  trainer.round(steps);
  const auto result = profiler::disableProfiler();
  result->save(file);
  std::vector<Interval> communicating, computing;
  for (const auto& event : result->events()) {
    if (event.deviceType() != at::kCUDA) continue;
    const Interval interval(event.startNs(), event.endNs());
    const bool nccl = event.name().find("nccl") != std::string::npos;
    (nccl ? communicating : computing).push_back(interval);
  }
  const auto busy = merged(communicating);
  const double all_steps = steps + kWarmUp;
  return {.communicated_ms = milliseconds(busy) / all_steps,
          .hidden_ms = milliseconds(common(busy, merged(computing))) / all_steps};
}

}  // namespace yoke::cli
