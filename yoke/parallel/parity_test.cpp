// SPDX-License-Identifier: Apache-2.0
// Data parallelism equals one device: every model, number of ranks, ZeRO stage and way to cut a
// batch against a plain loop that knows nothing of ranks.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>

#include "yoke/parallel/ranks_test.h"

namespace yoke::parallel {
namespace {

constexpr int64_t kBatch = 12, kSteps = 4;
constexpr double kLr = 0.02, kClip = 0.5, kMomentum = 0.9, kDecay = 0.1;

struct Trial {
  std::string model = "mlp";
  at::ScalarType dtype = at::kDouble;
  std::string optimizer = "sgd";
  int zero = 0;
  int micro_batches = 1;  // of each rank
  std::function<void(DataParallelOptions&)> change = [](auto&) {};
  std::function<double(int64_t)> count = [](int64_t samples) { return double(samples); };
  bool untie = false;  // the head's gradient is lost
  // The samples of a rank; none: it has run out of data.
  std::function<std::pair<int64_t, int64_t>(int64_t step, int rank)> cut = nullptr;
};

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> first_gradient, parameters;
};

// The truth: one device, the whole batch at once, textbook updates.
Outcome alone(const Trial& run) {
  const auto model = make_model(run.model, run.dtype);
  Outcome outcome;
  std::map<std::string, at::Tensor> first, second;
  std::map<std::string, int> steps;
  for (int64_t step = 0; step < kSteps; ++step) {
    model->zero_grad();
    const at::Tensor loss = model->loss_sum(step, 0, kBatch);
    loss.backward();
    outcome.losses.push_back(loss.item<double>() / kBatch);
    const at::NoGradGuard no_grad;
    double squares = 0;
    for (const auto& item : model->named_parameters())
      if (item.value().grad().defined())
        squares += (item.value().grad() / kBatch).to(at::kDouble).square().sum().item<double>();
    outcome.norms.push_back(std::sqrt(squares));
    const double clipped = std::min(1.0, kClip / (std::sqrt(squares) + 1e-6));
    for (auto& item : model->named_parameters()) {
      at::Tensor& w = item.value();
      if (!w.grad().defined()) continue;
      at::Tensor g = w.grad() / kBatch;
      const int n = ++steps[item.key()];
      if (step == 0) outcome.first_gradient[item.key()] = w.grad().cpu().clone();
      g *= clipped;
      at::Tensor &m = first[item.key()], &v = second[item.key()];
      if (n == 1) m = at::zeros_like(w), v = at::zeros_like(w);
      const double decay = w.dim() >= 2 ? kDecay : 0;
      if (run.optimizer == "sgd") {
        g += decay * w;
        m = n == 1 ? g : kMomentum * m + g;
        w -= kLr * m;
      } else if (run.optimizer == "adamw") {
        w *= 1 - kLr * decay;
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        const double c1 = 1 - std::pow(0.9, n), c2 = 1 - std::pow(0.999, n);
        w -= kLr * (m / c1) / ((v / c2).sqrt() + 1e-8);
      } else {
        w *= 1 - kLr * decay;
        w -= kLr * (0.9 * m + 0.1 * g).sign();
        m = 0.99 * m + 0.01 * g;
      }
    }
  }
  for (const auto& item : model->named_parameters())
    outcome.parameters[item.key()] = item.value().detach().cpu().clone();
  return outcome;
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, DataParallel& dp) {
  const OptimizerOptions common{.lr = kLr, .weight_decay = kDecay, .clip = kClip};
  if (name == "sgd") return std::make_unique<Sgd>(dp, SgdOptions{common, kMomentum});
  if (name == "adamw") return std::make_unique<AdamW>(dp, AdamWOptions{common});
  return std::make_unique<Lion>(dp, LionOptions{common});
}

// The sums of gradients over all ranks and passes.
std::map<std::string, at::Tensor> summed_gradients(DataParallel& dp) {
  std::map<std::string, at::Tensor> result;
  const auto reduced = dp.reduced();
  for (const auto& parameter : dp.layout().parameters)
    result[parameter.name] = at::zeros({parameter.count()}, reduced.parts[0].gradients.options());
  for (const auto& part : reduced.parts)
    for (const auto& piece : part.pieces)
      result[dp.layout().parameters[size_t(piece.parameter)].name]
          .narrow(0, piece.first, piece.count)
          .copy_(part.gradients.narrow(0, piece.offset, piece.count));
  for (size_t p = 0; p < dp.layout().parameters.size(); ++p) {
    const auto& parameter = dp.layout().parameters[p];
    at::Tensor& sum = result[parameter.name];
    if (dp.options().zero > 0) dp.comm().all_reduce(sum).wait();
    sum = sum.view(parameter.shape).cpu() / dp.loss_scale().value;
    if (!reduced.used[p]) result.erase(parameter.name);
  }
  return result;
}

Outcome train(Communicator& comm, const Trial& run) {
  Outcome outcome;
  static std::mutex building;
  std::unique_lock lock(building);
  const auto model = make_model(run.model, run.dtype);
  if (run.untie) dynamic_cast<Gpt&>(*model).untie = true;
  lock.unlock();
  DataParallelOptions options{.zero = run.zero, .bucket_bytes = 4000, .first_bucket_bytes = 600};
  run.change(options);
  DataParallel dp(*model, comm, options);
  const auto optimizer = make_optimizer(run.optimizer, dp);
  const int size = comm.size();
  for (int64_t step = 0; step < kSteps; ++step) {
    at::Tensor total = at::zeros({}, at::device(test_device()).dtype(at::kDouble));
    const auto [begin, end] =
        run.cut ? run.cut(step, comm.rank())
                : std::pair(kBatch * comm.rank() / size, kBatch * (comm.rank() + 1) / size);
    for (int m = 0; m < run.micro_batches; ++m) {
      const int64_t first = begin + (end - begin) * m / run.micro_batches,
                    last = begin + (end - begin) * (m + 1) / run.micro_batches;
      at::Tensor loss;
      if (last > first) {
        loss = model->loss_sum(step, first, last);
        total += loss.detach().to(at::kDouble);
      }
      if (m + 1 < run.micro_batches)
        dp.accumulate(loss, run.count(last - first));
      else
        dp.backward(loss, run.count(last - first));
    }
    if (step == 0) outcome.first_gradient = summed_gradients(dp);
    const auto info = optimizer->step();
    comm.all_reduce(total).wait();
    outcome.losses.push_back(total.item<double>() / kBatch);
    outcome.norms.push_back(info.grad_norm());
  }
  dp.check_replicas();
  dp.gathered([&] {
    for (const auto& item : model->named_parameters())
      outcome.parameters[item.key()] = item.value().detach().cpu().clone();
  });
  return outcome;
}

// One after the other in one world.
std::vector<Outcome> together(int ranks, const std::vector<Trial>& trials) {
  std::vector<Outcome> outcomes;
  std::atomic<bool> claimed = false;  // every rank has the same outcomes
  on_ranks(ranks, [&](Communicator& comm) {
    std::vector<Outcome> mine;
    for (const auto& trial : trials) mine.push_back(train(comm, trial));
    if (!claimed.exchange(true)) outcomes = std::move(mine);
  });
  return outcomes;
}
Outcome together(int ranks, const Trial& trial) { return together(ranks, std::vector{trial})[0]; }

double largest_difference(const std::map<std::string, at::Tensor>& a,
                          const std::map<std::string, at::Tensor>& b, bool relative,
                          double smallest = 1e-3) {
  double largest = 0;
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [name, x] : a) {
    const at::Tensor y = b.at(name).to(at::kDouble);
    const double difference = (x.to(at::kDouble) - y).abs().max().item<double>();
    const double size = std::max(y.abs().max().item<double>(), smallest);
    largest = std::max(largest, relative ? difference / size : difference);
  }
  return largest;
}

struct Tolerance {
  double gradient, loss, parameter;
  double smallest = 1e-3;  // of a gradient that is compared relative to itself
};

void expect_parity(int ranks, const std::vector<Trial>& trials, const Tolerance& tolerance,
                   const Outcome& truth) {
  const auto outcomes = together(ranks, trials);
  for (size_t t = 0; t < trials.size(); ++t) {
    const Trial& run = trials[t];
    const Outcome& outcome = outcomes[t];
    SCOPED_TRACE(cat(run.model, " ", run.optimizer, " on ", ranks, " ranks, ZeRO ", run.zero, ", ",
                     run.micro_batches, " micro-batches"));
    ASSERT_EQ(outcome.losses.size(), truth.losses.size());
    for (size_t i = 0; i < truth.losses.size(); ++i) {
      EXPECT_NEAR(outcome.losses[i], truth.losses[i], tolerance.loss * truth.losses[i]) << i;
      EXPECT_NEAR(outcome.norms[i], truth.norms[i], 10 * tolerance.loss * truth.norms[i]) << i;
    }
    EXPECT_LE(
        largest_difference(outcome.first_gradient, truth.first_gradient, true, tolerance.smallest),
        tolerance.gradient);
    const bool relative = run.optimizer == "sgd" || run.dtype == at::kDouble;
    EXPECT_LE(largest_difference(outcome.parameters, truth.parameters, relative),
              tolerance.parameter);
  }
}

// A trial at every stage, with and without accumulation.
std::vector<Trial> stages(Trial run) {
  std::vector<Trial> trials;
  for (run.zero = 0; run.zero <= 3; ++run.zero)
    for (run.micro_batches = 1; run.micro_batches <= 3; run.micro_batches += 2)
      trials.push_back(run);
  return trials;
}

class Parity : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Parity, InFloat64EqualsOneDevice) {
  const auto& [model, optimizer] = GetParam();
  const Trial run{.model = model, .optimizer = optimizer};
  const auto truth = alone(run);
  for (const int ranks : sizes()) expect_parity(ranks, stages(run), {1e-11, 1e-11, 1e-11}, truth);
}

TEST_P(Parity, InFloat32EqualsOneDevice) {
  const auto& [model, optimizer] = GetParam();
  if (optimizer == "lion") GTEST_SKIP() << "a sign may flip";
  const Trial run{.model = model, .dtype = at::kFloat, .optimizer = optimizer};
  const auto truth = alone(run);
  for (const int ranks : sizes())
    expect_parity(ranks, stages(run), {1e-5, 1e-5, optimizer == "sgd" ? 1e-6 : 0.05 * kLr * kSteps},
                  truth);
}

// oneDNN's convolutions in few bits round as the processor and the size of the batch have it, which
// would be measured here beside what ranks do.
struct WithoutOneDnn {
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(before); }
  const bool before = at::globalContext().userEnabledMkldnn();
};

// With fewer bits one rank, whose losses are near the truth, is the measure of the others.
TEST_P(Parity, InFewerBitsEqualsOneRank) {
  const auto& [model, optimizer] = GetParam();
  if (optimizer == "lion") GTEST_SKIP() << "a sign may flip";
  const WithoutOneDnn same_everywhere;
  Trial run{.model = model, .dtype = at::kFloat, .optimizer = optimizer};
  const auto exact = alone(run);
  for (const auto precision : {Precision::Bf16, Precision::Fp16}) {
    run.change = [&](auto& options) {
      options.precision = precision;
      options.loss_scale = 1024;
    };
    const double bits = precision == Precision::Bf16 ? 0x1p-8 : 0x1p-11;
    const auto truth = together(1, run);
    for (size_t i = 0; i < exact.losses.size(); ++i)
      EXPECT_NEAR(truth.losses[i], exact.losses[i], 0.03 * exact.losses[i]);
    const double parameter = optimizer == "sgd" ? 4 * bits : 2 * kLr * kSteps;
    for (const int ranks : sizes())
      expect_parity(ranks, stages(run), {16 * bits, bits, parameter, 0.1}, truth);
  }
}

// The gradient of a key's bias is 0 but for rounding, of which Lion takes the sign: no GPT for it.
INSTANTIATE_TEST_SUITE_P(Models, Parity,
                         testing::Values(std::tuple("mlp", "sgd"), std::tuple("mlp", "adamw"),
                                         std::tuple("mlp", "lion"), std::tuple("cnn", "sgd"),
                                         std::tuple("cnn", "adamw"), std::tuple("cnn", "lion"),
                                         std::tuple("gpt", "sgd"), std::tuple("gpt", "adamw")),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param);
                         });

bool same_bits(const Outcome& a, const Outcome& b) {
  for (const auto& [name, x] : a.parameters)
    if (!at::equal(x, b.parameters.at(name))) return false;
  return a.norms == b.norms;
}

class ParityBits : public testing::Test {
 protected:
  void SetUp() override {
    if (over_nccl()) GTEST_SKIP() << "NCCL does not promise an order of its sums";
  }
};

TEST_F(ParityBits, RanksAreWhatMicroBatchesAre) {
  if (!tries(3)) GTEST_SKIP() << "wants 3 ranks";
  for (const auto precision : {Precision::AsIs, Precision::Bf16, Precision::Fp16})
    for (const auto* model : {"mlp", "cnn", "gpt"})
      for (const auto* optimizer : {"sgd", "adamw", "lion"}) {
        Trial run{.model = model, .dtype = at::kFloat, .optimizer = optimizer, .micro_batches = 3};
        run.change = [&](auto& options) {
          options.precision = precision;
          options.loss_scale = 1024;
        };
        const auto one = together(1, run);
        run.micro_batches = 1;
        for (run.zero = 0; run.zero <= 1; ++run.zero)
          EXPECT_TRUE(same_bits(one, together(3, run)))
              << model << " " << optimizer << ", ZeRO " << run.zero << ", " << int(precision);
      }
}

TEST_F(ParityBits, StagesZeroAndOneAreEqualAndSoAreTwoAndThree) {
  if (!tries(2)) GTEST_SKIP() << "wants 2 ranks";
  for (const auto* model : {"mlp", "cnn", "gpt"})
    for (const auto* optimizer : {"sgd", "adamw"}) {
      Trial run{.model = model, .dtype = at::kFloat, .optimizer = optimizer, .micro_batches = 2};
      std::vector<Trial> trials;
      for (const int zero : {0, 1, 2, 3, 3, 3}) {
        run.zero = zero;
        trials.push_back(run);
      }
      trials.back().change = [](auto& options) { options.reshard_after_forward = false; };
      const auto outcomes = together(2, trials);
      EXPECT_TRUE(same_bits(outcomes[0], outcomes[1])) << model << optimizer;
      EXPECT_TRUE(same_bits(outcomes[2], outcomes[3])) << model << optimizer;
      EXPECT_TRUE(same_bits(outcomes[2], outcomes[4])) << "from run to run";
      EXPECT_TRUE(same_bits(outcomes[2], outcomes[5])) << "without resharding";
    }
}

TEST(ParityShares, UnevenPartsOfABatchGiveItsGradient) {
  if (!tries(3)) GTEST_SKIP() << "wants 3 ranks";
  std::vector<Trial> trials;
  for (int zero = 0; zero <= 3; ++zero) {
    Trial run{.zero = zero};
    run.cut = [](int64_t step, int rank) {
      const std::vector<int64_t> bounds =
          step % 2 == 0 ? std::vector<int64_t>{0, 7, 8, 12} : std::vector<int64_t>{0, 1, 10, 12};
      return std::pair(bounds[size_t(rank)], bounds[size_t(rank) + 1]);
    };
    trials.push_back(run);
  }
  expect_parity(3, trials, {1e-11, 1e-11, 1e-11}, alone({}));
}

TEST(ParityShares, ARankThatHasRunOutOfDataTakesPart) {
  if (!tries(3)) GTEST_SKIP() << "wants 3 ranks";
  for (const auto* model : {"mlp", "gpt"}) {
    std::vector<Trial> trials;
    for (int zero = 0; zero <= 3; ++zero)
      for (const int micro_batches : {1, 2})
        for (const bool reshard : {true, false}) {
          Trial run{.model = model, .zero = zero, .micro_batches = micro_batches};
          run.change = [=](auto& options) { options.reshard_after_forward = reshard; };
          run.cut = [](int64_t step, int rank) -> std::pair<int64_t, int64_t> {
            const bool idle = step > 0 && rank == int(step) % 3;
            if (step == 0) return {4 * rank, 4 * rank + 4};
            if (idle) return {0, 0};
            return (rank + 1) % 3 == int(step) % 3 ? std::pair(0, 5) : std::pair(5, 12);
          };
          trials.push_back(run);
        }
    expect_parity(3, trials, {1e-11, 1e-11, 1e-11}, alone({.model = model}));
  }
}

TEST(ParityUnused, ParametersWithoutAGradientAreNotStepped) {
  for (const auto* optimizer : {"sgd", "adamw", "lion"}) {
    const auto truth = alone({.model = "branches", .optimizer = optimizer});
    for (const int ranks : sizes()) {
      std::vector<Trial> trials;
      for (int zero = 0; zero <= 3; ++zero)
        trials.push_back({.model = "branches", .optimizer = optimizer, .zero = zero});
      expect_parity(ranks, trials, {1e-11, 1e-11, 1e-11}, truth);
    }
  }
}

// Mistakes that this suite must not overlook.
class FaultyWire final : public Wire {
 public:
  enum class Fault { TimesRanks, SkipsABucket, CountsRankOneTwice };
  explicit FaultyWire(Fault fault) : fault_(fault) {}

  comm::Work all_reduce(const comm::Communicator& comm, const at::Tensor& full) const override {
    if (spoil(comm, full)) return {};
    return comm.all_reduce(full);
  }
  comm::Work reduce_scatter(const comm::Communicator& comm, const at::Tensor& shard,
                            const at::Tensor& full) const override {
    if (spoil(comm, full)) return {};
    return comm.reduce_scatter(shard, full);
  }

 private:
  bool spoil(const comm::Communicator& comm, const at::Tensor& full) const {
    if (fault_ == Fault::TimesRanks) full.mul_(comm.size());
    if (fault_ == Fault::CountsRankOneTwice && comm.rank() == 1) full.mul_(2);
    return fault_ == Fault::SkipsABucket && !std::exchange(skipped_, true);
  }
  const Fault fault_;
  mutable bool skipped_ = false;  // every rank has its own wire
};

// A GPU leaves a step out without telling the host.
TEST(ParityOfCounts, LeaveOutWhatWasSkipped) {
  on_ranks(sizes()[0], [](Communicator& comm) {
    const auto model = make_model("mlp", at::kFloat);
    DataParallel dp(*model, comm, {});
    AdamW optimizer(dp, {{.lr = 0.01, .skip_bad = true}});
    for (int64_t step = 0; step < 4; ++step) {
      const at::Tensor loss = model->loss_sum(step, 0, 2);
      dp.backward(step == 1 ? loss * std::numeric_limits<double>::quiet_NaN() : loss, 2);
      optimizer.step();
      if (step == 2) {
        EXPECT_EQ(optimizer.parameter_steps()[0], 2);
      }
    }
    for (const int64_t count : optimizer.parameter_steps()) EXPECT_EQ(count, 3);
  });
}

TEST(ParityPlanted, MistakesAreFound) {
  if (!tries(2)) GTEST_SKIP() << "wants 2 ranks";
  using Fault = FaultyWire::Fault;
  const auto truth = alone({.model = "gpt"});
  auto found = [&](const Trial& run) {
    Outcome outcome;
    try {
      outcome = together(2, run);
    } catch (const Error& error) {  // replicas that have diverged are noticed sooner
      return std::string(error.what()).find("diverged") != std::string::npos;
    }
    return largest_difference(outcome.first_gradient, truth.first_gradient, true) > 1e-6 ||
           std::abs(outcome.norms[0] / truth.norms[0] - 1) > 1e-6;
  };
  for (int zero = 0; zero <= 3; ++zero) {
    Trial run{.model = "gpt", .zero = zero};
    EXPECT_FALSE(found(run));
    for (const auto fault : {Fault::TimesRanks, Fault::SkipsABucket, Fault::CountsRankOneTwice}) {
      run.change = [&](auto& options) { options.wire = std::make_shared<FaultyWire>(fault); };
      EXPECT_TRUE(found(run)) << "fault " << int(fault) << ", ZeRO " << zero;
    }
    run.change = [](auto&) {};
    run.count = [](int64_t) { return 1.0; };
    EXPECT_TRUE(found(run)) << "a missing division, ZeRO " << zero;
    run.count = [](int64_t samples) { return double(samples); };
    run.untie = true;
    EXPECT_TRUE(found(run)) << "a tied gradient that is added once, ZeRO " << zero;
  }
}

}  // namespace
}  // namespace yoke::parallel
