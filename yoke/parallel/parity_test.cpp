// SPDX-License-Identifier: Apache-2.0
// Data parallelism equals one device: every model, number of ranks, ZeRO stage and way to cut a
// batch against a plain loop that knows nothing of ranks.
#include <gtest/gtest.h>

#include <map>

#include "yoke/comm/run_ranks.h"
#include "yoke/parallel/data_parallel.h"
#include "yoke/parallel/models_test.h"
#include "yoke/parallel/optimizer.h"

namespace yoke::parallel {
namespace {

constexpr int64_t kBatch = 12, kSteps = 4;
constexpr double kLr = 0.02, kClip = 0.5, kMomentum = 0.9, kDecay = 0.1;

struct Trial {
  std::string model = "mlp";
  at::ScalarType dtype = at::kDouble;
  std::string optimizer = "sgd";
  int ranks = 1;
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
      if (step == 0) outcome.first_gradient[item.key()] = w.grad().clone();
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
    outcome.parameters[item.key()] = item.value().detach().clone();
  return outcome;
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, DataParallel& dp) {
  const OptimizerOptions common{.lr = kLr, .weight_decay = kDecay, .clip = kClip};
  if (name == "sgd") return std::make_unique<Sgd>(dp, SgdOptions{common, kMomentum});
  if (name == "adamw") return std::make_unique<AdamW>(dp, AdamWOptions{common});
  return std::make_unique<Lion>(dp, LionOptions{common});
}

// The sums of gradients over all ranks, as one rank sees its part of them.
void add_gradients(DataParallel& dp, std::map<std::string, at::Tensor>& into) {
  const auto reduced = dp.reduced();
  for (const auto& part : reduced.parts)
    for (const auto& piece : part.pieces) {
      const auto& parameter = dp.layout().parameters[size_t(piece.parameter)];
      at::Tensor& all = into[parameter.name];
      if (!all.defined()) all = at::zeros({parameter.count()}, part.gradients.options());
      all.narrow(0, piece.first, piece.count)
          .copy_(part.gradients.narrow(0, piece.offset, piece.count));
    }
}

Outcome together(const Trial& run) {
  Outcome outcome;
  std::vector<std::map<std::string, at::Tensor>> gradients(size_t(run.ranks));
  std::mutex building;
  auto rank_main = [&](comm::Communicator& comm) {
    std::shared_ptr<TestModel> model;
    {
      const std::lock_guard lock(building);
      model = make_model(run.model, run.dtype);
      if (run.untie) dynamic_cast<Gpt&>(*model).untie = true;
    }
    DataParallelOptions options{.zero = run.zero, .bucket_bytes = 4000, .first_bucket_bytes = 600};
    run.change(options);
    DataParallel dp(*model, comm, options);
    const auto optimizer = make_optimizer(run.optimizer, dp);
    for (int64_t step = 0; step < kSteps; ++step) {
      at::Tensor total = at::zeros({}, at::kDouble);
      const auto [begin, end] = run.cut ? run.cut(step, comm.rank())
                                        : std::pair(kBatch * comm.rank() / run.ranks,
                                                    kBatch * (comm.rank() + 1) / run.ranks);
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
      if (step == 0) add_gradients(dp, gradients[size_t(comm.rank())]);
      const auto info = optimizer->step();
      comm.all_reduce(total).wait();
      if (comm.rank() != 0) continue;
      outcome.losses.push_back(total.item<double>() / kBatch);
      outcome.norms.push_back(info.grad_norm);
    }
    dp.check_replicas();
    dp.gathered([&] {
      if (comm.rank() != 0) return;
      for (const auto& item : model->named_parameters())
        outcome.parameters[item.key()] = item.value().detach().clone();
    });
  };
  // Matrix products round otherwise with more threads.
  comm::run_ranks(run.ranks, rank_main, {.threads_per_rank = 1});
  for (auto& [name, parameter] : outcome.parameters) {
    at::Tensor sum;
    for (auto& each : gradients)
      if (each.contains(name)) sum = sum.defined() && run.zero > 0 ? sum + each[name] : each[name];
    const bool used =
        run.model != "branches" || name.starts_with("always") || name.starts_with("late");
    if (used) outcome.first_gradient[name] = sum.view(parameter.sizes());
  }
  return outcome;
}

double largest_difference(const std::map<std::string, at::Tensor>& a,
                          const std::map<std::string, at::Tensor>& b, bool relative) {
  double largest = 0;
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [name, x] : a) {
    const at::Tensor y = b.at(name).to(at::kDouble);
    const double difference = (x.to(at::kDouble) - y).abs().max().item<double>();
    const double size = std::max(y.abs().max().item<double>(), 1e-3);
    largest = std::max(largest, relative ? difference / size : difference);
  }
  return largest;
}

struct Tolerance {
  double gradient, loss, parameter;
};

void expect_parity(const Trial& run, const Tolerance& tolerance, const Outcome& truth) {
  const auto outcome = together(run);
  const std::string what = cat(run.model, " ", run.optimizer, " on ", run.ranks, " ranks, ZeRO ",
                               run.zero, ", ", run.micro_batches, " micro-batches");
  ASSERT_EQ(outcome.losses.size(), truth.losses.size()) << what;
  for (size_t i = 0; i < truth.losses.size(); ++i) {
    EXPECT_NEAR(outcome.losses[i], truth.losses[i], tolerance.loss * truth.losses[i])
        << what << ", step " << i;
    EXPECT_NEAR(outcome.norms[i], truth.norms[i], 10 * tolerance.loss * truth.norms[i])
        << what << ", step " << i;
  }
  EXPECT_LE(largest_difference(outcome.first_gradient, truth.first_gradient, true),
            tolerance.gradient)
      << what;
  EXPECT_LE(largest_difference(outcome.parameters, truth.parameters, run.optimizer == "sgd"),
            tolerance.parameter)
      << what;
}

class Parity : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Parity, InFloat64EqualsOneDevice) {
  const auto& [model, optimizer] = GetParam();
  Trial run{.model = model, .optimizer = optimizer};
  const auto truth = alone(run);
  for (run.ranks = 1; run.ranks <= 4; ++run.ranks)
    for (run.zero = 0; run.zero <= 3; ++run.zero)
      for (run.micro_batches = 1; run.micro_batches <= 3; run.micro_batches += 2)
        expect_parity(run, {1e-11, 1e-11, optimizer == "sgd" ? 1e-11 : 1e-9}, truth);
}

TEST_P(Parity, InFloat32EqualsOneDevice) {
  const auto& [model, optimizer] = GetParam();
  if (optimizer == "lion") GTEST_SKIP() << "a sign may flip";
  Trial run{.model = model, .dtype = at::kFloat, .optimizer = optimizer};
  const auto truth = alone(run);
  for (run.ranks = 1; run.ranks <= 4; ++run.ranks)
    for (run.zero = 0; run.zero <= 3; ++run.zero)
      for (run.micro_batches = 1; run.micro_batches <= 3; run.micro_batches += 2)
        expect_parity(run, {1e-5, 1e-5, optimizer == "sgd" ? 1e-5 : 0.05 * kLr * kSteps}, truth);
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

TEST(ParityBits, RanksAreWhatMicroBatchesAre) {
  for (const auto* model : {"mlp", "cnn", "gpt"})
    for (const auto* optimizer : {"sgd", "adamw", "lion"}) {
      Trial run{.model = model, .dtype = at::kFloat, .optimizer = optimizer, .micro_batches = 3};
      const auto one = together(run);
      run.ranks = 3, run.micro_batches = 1;
      for (run.zero = 0; run.zero <= 1; ++run.zero)
        EXPECT_TRUE(same_bits(one, together(run))) << model << optimizer << run.zero;
    }
}

TEST(ParityBits, StagesZeroAndOneAreEqualAndSoAreTwoAndThree) {
  for (const auto* model : {"mlp", "cnn", "gpt"})
    for (const auto* optimizer : {"sgd", "adamw"}) {
      Trial run{.model = model,
                .dtype = at::kFloat,
                .optimizer = optimizer,
                .ranks = 2,
                .micro_batches = 2};
      const auto zero = together(run);
      run.zero = 1;
      EXPECT_TRUE(same_bits(zero, together(run))) << model << optimizer;
      run.zero = 2;
      const auto two = together(run);
      run.zero = 3;
      EXPECT_TRUE(same_bits(two, together(run))) << model << optimizer;
      EXPECT_TRUE(same_bits(two, together(run))) << "from run to run";
      run.change = [](auto& options) { options.reshard_after_forward = false; };
      EXPECT_TRUE(same_bits(two, together(run))) << "without resharding";
    }
}

TEST(ParityShares, UnevenPartsOfABatchGiveItsGradient) {
  const auto truth = alone({});
  for (int zero = 0; zero <= 3; ++zero) {
    Trial run{.ranks = 3, .zero = zero};
    run.cut = [](int64_t step, int rank) {
      const std::vector<int64_t> bounds =
          step % 2 == 0 ? std::vector<int64_t>{0, 7, 8, 12} : std::vector<int64_t>{0, 1, 10, 12};
      return std::pair(bounds[size_t(rank)], bounds[size_t(rank) + 1]);
    };
    expect_parity(run, {1e-11, 1e-11, 1e-11}, truth);
  }
}

TEST(ParityShares, ARankThatHasRunOutOfDataTakesPart) {
  for (const auto* model : {"mlp", "gpt"}) {
    const auto truth = alone({.model = model});
    for (int zero = 0; zero <= 3; ++zero)
      for (const int micro_batches : {1, 2})
        for (const bool reshard : {true, false}) {
          Trial run{.model = model, .ranks = 3, .zero = zero, .micro_batches = micro_batches};
          run.change = [&](auto& options) { options.reshard_after_forward = reshard; };
          run.cut = [](int64_t step, int rank) -> std::pair<int64_t, int64_t> {
            const bool idle = step > 0 && rank == int(step) % 3;
            if (step == 0) return {4 * rank, 4 * rank + 4};
            if (idle) return {0, 0};
            return (rank + 1) % 3 == int(step) % 3 ? std::pair(0, 5) : std::pair(5, 12);
          };
          expect_parity(run, {1e-11, 1e-11, 1e-11}, truth);
        }
  }
}

TEST(ParityUnused, ParametersWithoutAGradientAreNotStepped) {
  for (const auto* optimizer : {"sgd", "adamw", "lion"}) {
    const auto truth = alone({.model = "branches", .optimizer = optimizer});
    for (int ranks = 1; ranks <= 3; ++ranks)
      for (int zero = 0; zero <= 3; ++zero) {
        const Trial run{.model = "branches", .optimizer = optimizer, .ranks = ranks, .zero = zero};
        expect_parity(run, {1e-11, 1e-11, optimizer == std::string("sgd") ? 1e-11 : 1e-9}, truth);
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

TEST(ParityPlanted, MistakesAreFound) {
  using Fault = FaultyWire::Fault;
  const auto truth = alone({.model = "gpt"});
  auto found = [&](const Trial& run) {
    Outcome outcome;
    try {
      outcome = together(run);
    } catch (const Error& error) {  // replicas that have diverged are noticed sooner
      return std::string(error.what()).find("diverged") != std::string::npos;
    }
    return largest_difference(outcome.first_gradient, truth.first_gradient, true) > 1e-6 ||
           std::abs(outcome.norms[0] / truth.norms[0] - 1) > 1e-6;
  };
  for (int zero = 0; zero <= 3; ++zero) {
    Trial run{.model = "gpt", .ranks = 2, .zero = zero};
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
