// SPDX-License-Identifier: Apache-2.0
// What tests of a pool share: one with a model of its own, requests and what came of them. A batch
// with kHeld among its rows' first values can be told to wait, which decides what waits behind it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "yoke/serve/pool.h"
#include "yoke/serve/stand_in.h"

namespace yoke::serve {

using std::chrono::milliseconds;
using std::chrono::seconds;

inline Time soon() { return SteadyClock().now() + std::chrono::minutes(2); }

// This very program, as a worker: see PoolWorker.
inline const std::vector<std::string> kWorker{"/proc/self/exe",
                                              "--gtest_filter=PoolWorker.ComputesForItsParent"};

struct Bench {
  explicit Bench(const std::string& path, const std::string& devices = "cpu:2", int64_t batch = 8,
                 bool processes = false, std::vector<TenantConfig> tenants = {},
                 Duration stuck_floor = seconds(20))
      : Bench(options(processes, stuck_floor),
              {.name = "m", .path = path, .devices = devices, .batch = batch}, tenants) {}
  Bench(const PoolOptions& options, const ModelConfig& model,
        const std::vector<TenantConfig>& tenants = {},
        const observe::LogOptions& log = {.level = observe::Level::Off,
                                          .other_ranks = observe::Level::Off})
      : pool(options, observe::Log(log), metrics) {
    pool.set_tenants(tenants);
    pool.load(model);
    pool.wait_ready(seconds(60));
  }
  static PoolOptions options(bool processes = false, Duration stuck_floor = seconds(20)) {
    PoolOptions options{.slab_bytes = 4 << 20, .poison = true, .stuck_floor = stuck_floor};
    if (processes) {
      options.workers.command = kWorker;
      options.workers.environment = {"YOKE_TEST_WORKER=1"};
    } else {
      options.workers.open = open_stand_in;
    }
    return options;
  }
  observe::Registry metrics;
  Pool pool;
};

inline Request request_of(const std::vector<std::array<float, 4>>& rows,
                          Parameters parameters = {}) {
  const auto data = std::make_shared<std::string>(reinterpret_cast<const char*>(rows.data()),
                                                  rows.size() * sizeof(rows[0]));
  Request request{.model = "m", .parameters = std::move(parameters), .holds = {data}};
  request.inputs = {{.name = "x", .shape = {int64_t(rows.size()), 4}, .data = *data}};
  return request;
}
inline Request row_of(float value, Parameters parameters = {}) {
  return request_of({{value, 1, 2, 3}}, std::move(parameters));
}

inline std::vector<float> floats(const Answer& answer) {
  std::vector<float> values(answer.outputs.at(0).data.size() / sizeof(float));
  std::memcpy(values.data(), answer.outputs[0].data.data(), answer.outputs[0].data.size());
  return values;
}

// What came of some requests, and a way to wait for all of them.
class Answers {
 public:
  OnAnswer next() {
    const MutexLock lock(mutex_);
    const size_t number = answers_.size();
    answers_.emplace_back();
    return [this, number](Answer answer) {
      const MutexLock inner(mutex_);
      EXPECT_EQ(answers_[number].size(), 0u) << "answered twice";
      answers_[number].push_back(std::move(answer));
      order_.push_back(number);
      changed_.notify_all();
    };
  }
  const std::vector<std::vector<Answer>>& wait() {
    const MutexLock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_until(mutex_, soon(), [&] { return order_.size() == answers_.size(); }))
        << order_.size() << " of " << answers_.size() << " answers";
    return answers_;
  }
  const std::vector<size_t>& order() { return wait(), order_; }
  size_t count(Status status) {
    size_t sum = 0;
    for (const auto& answer : wait())
      sum += answer.size() == 1 && answer[0].outcome.status == status;
    return sum;
  }

 private:
  Mutex mutex_;
  Condition changed_;
  std::vector<std::vector<Answer>> answers_;
  std::vector<size_t> order_;
};

inline void wait_until(const std::function<bool()>& condition) {
  for (const Time late = soon(); !condition(); std::this_thread::sleep_for(milliseconds(1)))
    if (SteadyClock().now() > late) return void(ADD_FAILURE() << "waited in vain");
}

// Tried three times at most, as the machine may stall in one.
inline void expect_within(Duration limit, const std::function<Duration()>& once) {
  Duration took = once();
  for (int i = 1; i < 3 && took >= limit; ++i) took = once();
  EXPECT_LT(took, limit);
}

// A stand-in that first tells which rows a batch has, by their first values.
using OnBatch = std::function<void(const ReplicaSpec& spec, const std::vector<float>& rows)>;
class Watched final : public Runner {
 public:
  Watched(const ReplicaSpec& spec, OnBatch on_batch)
      : spec_(spec), on_batch_(std::move(on_batch)), inner_(open_stand_in(spec)) {}
  const Facts& facts() const override { return inner_->facts(); }
  void run(const Call& call, Outputs& outputs) override {
    std::vector<float> rows(size_t(call.inputs[0].shape[0]));
    const size_t each = call.inputs[0].bytes / rows.size();
    for (size_t i = 0; i < rows.size(); ++i)
      std::memcpy(&rows[i], call.inputs[0].data + i * each, sizeof(float));
    on_batch_(spec_, rows);
    inner_->run(call, outputs);
  }

 private:
  const ReplicaSpec spec_;
  const OnBatch on_batch_;
  const std::unique_ptr<Runner> inner_;
};
inline PoolOptions watched(OnBatch on_batch) {
  auto options = Bench::options(false, std::chrono::minutes(5));
  options.workers.open = [on_batch = std::move(on_batch)](const ReplicaSpec& spec) {
    return std::make_unique<Watched>(spec, on_batch);
  };
  return options;
}

// A runner of a test's own.
struct Made final : Runner {
  Facts told = {.platform = "made", .inputs = {plan::parse_port("x:FP32[-1,4]")}, .batch = 8};
  std::function<void(const Call& call, Outputs& outputs)> on_run = {};
  std::function<void()> on_prompt = {};
  std::string parts = {};
  const Facts& facts() const override { return told; }
  std::string breakdown() const override { return parts; }
  void run(const Call& call, Outputs& outputs) override {
    if (on_run) on_run(call, outputs);
  }
  void generate(const std::string&, const std::string&,
                const std::function<bool(std::string_view)>& on_text) override {
    on_prompt();
    on_text("and so on");
  }
};
inline PoolOptions made(const Made& like, Duration stuck_floor = std::chrono::minutes(5)) {
  auto options = Bench::options(false, stuck_floor);
  options.workers.open = [like](const ReplicaSpec&) { return std::make_unique<Made>(like); };
  return options;
}

// Where a batch waits until it is let go.
inline constexpr float kHeld = 1000;
class Gate {
 public:
  void pass(const std::vector<float>& rows) {
    if (std::ranges::count(rows, kHeld) == 0) return;
    ++num_held_;
    open_.wait();
  }
  int num_held() const { return num_held_; }  // so far
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  const std::shared_future<void> open_ = promise_.get_future().share();
  std::atomic<int> num_held_{0};
};
inline PoolOptions held_at(Gate& gate) {
  return watched([&](const ReplicaSpec&, const std::vector<float>& rows) { gate.pass(rows); });
}

}  // namespace yoke::serve
