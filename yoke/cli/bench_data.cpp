// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_data.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <functional>
#include <mutex>
#include <optional>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/optimizer.h"

namespace yoke::cli {
namespace {

namespace nn = torch::nn;
using SteadyTime = std::chrono::steady_clock;

// The same models as in bench/peers/data_models.py.
struct BenchModel : nn::Module {
  virtual at::Tensor loss_sum() = 0;  // of a batch made once
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

struct Gpt : BenchModel {
  static constexpr int64_t kVocab = 1024, kTime = 256, kDim = 256, kHeads = 4, kBatch = 4;
  Gpt()
      : embedding(register_module("embedding", nn::Embedding(kVocab, kDim))),
        position(register_module("position", nn::Embedding(kTime, kDim))) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module(cat("block", i), std::make_shared<Block>(kDim, kHeads)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    const at::NoGradGuard no_grad;
    embedding->weight.mul_(0.02), position->weight.mul_(0.02);
    tokens = at::randint(kVocab, {kBatch, kTime + 1}, at::kLong);
    count = kBatch * kTime;
  }
  at::Tensor loss_sum() override {
    at::Tensor x = embedding(tokens.narrow(1, 0, kTime)) + position->weight;
    for (const auto& block : blocks) x = block->forward(x);
    const at::Tensor logits = at::linear(norm(x), embedding->weight);
    return at::cross_entropy_loss(logits.view({-1, kVocab}),
                                  tokens.narrow(1, 1, kTime).reshape({-1}), {}, at::Reduction::Sum);
  }
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
  std::vector<nn::Linear> layers;
  at::Tensor input, target;
};

std::shared_ptr<BenchModel> make_model(const std::string& name) {
  if (name == "gpt") return std::make_shared<Gpt>();
  return std::make_shared<Mlp>();
}

constexpr double kLr = 1e-4, kDecay = 0.01;
constexpr int kWarmUp = 3;

// Every rank does the steps and says how long; all of a world's ranks start together.
double time_steps(const comm::Communicator& comm, int steps, const std::function<void()>& step) {
  for (int i = 0; i < kWarmUp; ++i) step();
  comm.barrier();
  const auto start = SteadyTime::now();
  for (int i = 0; i < steps; ++i) step();
  const at::Tensor seconds =
      at::full({}, std::chrono::duration<double>(SteadyTime::now() - start).count(), at::kDouble);
  comm.all_reduce(seconds, comm::ReduceOp::Max).wait();
  return seconds.item<double>();
}

class OurTrainer final : public Trainer {
 public:
  OurTrainer(std::string model, int ranks, std::optional<int> zero)
      : model_(std::move(model)), ranks_(ranks), zero_(zero) {}

  double round(int steps) override {
    double seconds = 0;
    std::mutex building;
    comm::run_ranks(ranks_,
                    [&](comm::Communicator& comm) {
                      std::shared_ptr<BenchModel> model;
                      {
                        const std::lock_guard lock(building);
                        model = make_model(model_);
                      }
                      const double mine =
                          zero_ ? under(comm, *model, steps) : bare(comm, *model, steps);
                      if (comm.rank() == 0) seconds = mine;
                    },
                    {.threads_per_rank = 1});
    return seconds;
  }

 private:
  double under(const comm::Communicator& comm, BenchModel& model, int steps) const {
    parallel::DataParallel dp(model, comm, {.zero = *zero_});
    parallel::AdamW optimizer(dp, {{.lr = kLr, .weight_decay = kDecay}});
    return time_steps(comm, steps, [&] {
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
      counts.push_back(at::zeros({}));
    }
    return time_steps(comm, steps, [&] {
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
  const std::string model_;
  const int ranks_;
  const std::optional<int> zero_;
};

class Peer final : public Trainer {
 public:
  Peer(const std::string& name, const BenchData& bench)
      : process_({python_with_torch(), (peers_folder() / "data.py").string(), "--peer", name,
                  "--model", bench.model, "--ranks", cat(bench.ranks), "--threads", "1"}) {
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

std::unique_ptr<Trainer> make_trainer(const std::string& name, const BenchData& bench) {
  if (name == "alone") return std::make_unique<OurTrainer>(bench.model, 1, std::nullopt);
  if (name.starts_with("zero"))
    return std::make_unique<OurTrainer>(bench.model, bench.ranks, name[4] - '0');
  return std::make_unique<Peer>(name == "torch" ? "alone" : name, bench);
}

}  // namespace yoke::cli
