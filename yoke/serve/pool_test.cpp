// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/pool.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "yoke/base/rng.h"
#include "yoke/serve/stand_in.h"

namespace yoke::serve {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Time kSoon = SteadyClock().now() + std::chrono::minutes(2);

// This very program, as a worker: see PoolWorker.
const std::vector<std::string> kWorker{"/proc/self/exe",
                                       "--gtest_filter=PoolWorker.ComputesForItsParent"};

struct Bench {
  explicit Bench(const std::string& path, const std::string& devices = "cpu:2", int64_t batch = 8,
                 bool processes = false, std::vector<TenantConfig> tenants = {},
                 Duration stuck_floor = seconds(20))
      : pool(options(processes, stuck_floor),
             observe::Log({.level = observe::Level::Off, .other_ranks = observe::Level::Off}),
             metrics) {
    pool.set_tenants(tenants);
    pool.load({.name = "m", .path = path, .devices = devices, .batch = batch});
    pool.wait_ready(seconds(60));
  }
  static PoolOptions options(bool processes, Duration stuck_floor) {
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

Request request_of(const std::vector<std::array<float, 4>>& rows, Parameters parameters = {}) {
  const auto data = std::make_shared<std::string>(reinterpret_cast<const char*>(rows.data()),
                                                  rows.size() * sizeof(rows[0]));
  Request request{.model = "m", .parameters = std::move(parameters), .holds = {data}};
  request.inputs = {{.name = "x", .shape = {int64_t(rows.size()), 4}, .data = *data}};
  return request;
}
Request row_of(float value, Parameters parameters = {}) {
  return request_of({{value, 1, 2, 3}}, std::move(parameters));
}

std::vector<float> floats(const Answer& answer) {
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
        changed_.wait_until(mutex_, kSoon, [&] { return order_.size() == answers_.size(); }))
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

// Not a test of its own: what the pools below start as their worker processes.
TEST(PoolWorker, ComputesForItsParent) {
  if (!std::getenv("YOKE_TEST_WORKER")) GTEST_SKIP() << "no parent";
  run_worker(net::Descriptor(3), open_stand_in);
}

TEST(Pool, GivesEachRequestItsOwnRows) {
  Bench bench("stand-in:ms=0.2");
  Answers answers;
  for (int i = 0; i < 200; ++i)
    bench.pool.submit(
        request_of(std::vector<std::array<float, 4>>(size_t(i % 8 + 1), {float(i), 1, 2, 3})), 0,
        answers.next());
  const auto& all = answers.wait();
  bool mixed = false;
  for (int i = 0; i < 200; ++i) {
    const auto& answer = all[size_t(i)].at(0);
    ASSERT_TRUE(answer.outcome.ok()) << answer.outcome.text;
    EXPECT_EQ(answer.outputs[0].shape, (Shape{i % 8 + 1, 4}));
    const auto values = floats(answer);
    ASSERT_EQ(values.size(), size_t(i % 8 + 1) * 4);
    for (size_t j = 0; j < values.size(); j += 4) EXPECT_EQ(values[j], 2.0f * float(i));
    mixed |= answer.batch > i % 8 + 1;
  }
  EXPECT_TRUE(mixed) << "no batch had rows of two requests";
}

TEST(Pool, RefusesWhatDoesNotFitBeforeItIsScheduled) {
  Bench bench("stand-in:");
  Answers answers;
  auto wide = row_of(1);
  wide.inputs[0].shape = {1, 5};
  bench.pool.submit(std::move(wide), 0, answers.next());
  auto unknown = row_of(1);
  unknown.model = "n";
  bench.pool.submit(std::move(unknown), 0, answers.next());
  bench.pool.submit(request_of(std::vector<std::array<float, 4>>(9)), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[0][0].outcome.status, Status::Invalid);
  EXPECT_NE(all[0][0].outcome.text.find("wanted"), std::string::npos);
  EXPECT_EQ(all[1][0].outcome.status, Status::NotFound);
  EXPECT_EQ(all[2][0].outcome.text, "model 'm': wanted at most 8 rows, got 9");
}

TEST(Pool, AnswersAStreamInOrderWhateverBecomesOfItsRequests) {
  Bench bench("stand-in:ms=0,jitter_ms=4", "cpu:4", 1);
  Answers answers;
  const Rng rng(7, "kinds");
  std::vector<Pool::TicketPtr> to_cancel;
  for (uint64_t i = 0; i < 600; ++i) {
    const uint64_t kind = uint64_t(rng.uniform(i) * 8);
    Parameters parameters{.stream = "s"};
    if (kind == 0) parameters.timeout = milliseconds(2);
    auto ticket =
        bench.pool.submit(row_of(kind == 1 ? -1 : float(i), parameters), 0, answers.next());
    if (kind == 2) to_cancel.push_back(std::move(ticket));
    if (to_cancel.size() > 3) {
      for (const auto& one : to_cancel) bench.pool.cancel(one);
      to_cancel.clear();
    }
  }
  const auto& order = answers.order();
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_GT(answers.count(Status::Internal), 0u);
  EXPECT_GT(answers.count(Status::Cancelled), 0u);
  EXPECT_GT(answers.count(Status::Deadline), 0u);
  EXPECT_GT(answers.count(Status::Ok), 100u);
}

TEST(Pool, AnswersOutsideOfStreamsAsSoonAsTheyAreThere) {
  Bench bench("stand-in:ms=0,jitter_ms=4", "cpu:4", 1);
  Answers answers;
  for (int i = 0; i < 100; ++i) bench.pool.submit(row_of(float(i)), 0, answers.next());
  EXPECT_FALSE(std::ranges::is_sorted(answers.order()));
}

TEST(Pool, EndsARequestAtItsDeadline) {
  Bench bench("stand-in:ms=300", "cpu:1", 1);
  Answers answers;
  const Time begun = SteadyClock().now();
  bench.pool.submit(row_of(1, {.timeout = milliseconds(30)}), 0, answers.next());
  bench.pool.submit(row_of(2, {.timeout = milliseconds(30)}), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Deadline), 2u);
  EXPECT_LT(SteadyClock().now() - begun, milliseconds(250));
}

TEST(Pool, RefusesBeyondTheTenantsBound) {
  Bench bench("stand-in:ms=50", "cpu:1", 1, false, {{.name = "a", .max_queue = 3}, {.name = "b"}});
  Answers answers;
  const int a = bench.pool.tenant("a"), b = bench.pool.tenant("b");
  for (int i = 0; i < 5; ++i) bench.pool.submit(row_of(1), a, answers.next());
  bench.pool.submit(row_of(1), b, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(answers.count(Status::Exhausted), 2u);
  EXPECT_EQ(all[4][0].outcome.status, Status::Exhausted);
  EXPECT_GE(all[4][0].outcome.retry_after, 1);
  EXPECT_TRUE(all[5][0].outcome.ok());
}

TEST(Pool, FailsTheGuiltyRowAlone) {
  Bench bench("stand-in:ms=2", "cpu:1", 8);
  Answers answers;
  for (int i = 0; i < 64; ++i) bench.pool.submit(row_of(i % 16 == 5 ? -1 : 1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Internal), 4u);
  EXPECT_EQ(answers.count(Status::Ok), 60u);
}

TEST(Pool, KeepsExclusiveTenantsOutOfMixedBatches) {
  Bench bench("stand-in:ms=2", "cpu:1", 8, false,
              {{.name = "a", .exclusive_batch = true}, {.name = "b"}, {.name = "c"}});
  Answers answers;
  for (int i = 0; i < 30; ++i)
    for (const char* name : {"a", "b", "c"})
      bench.pool.submit(request_of({{1, 1, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3}}),
                        bench.pool.tenant(name), answers.next());
  const auto& all = answers.wait();
  std::map<std::string, int64_t> sums;
  for (const auto& tenant : bench.pool.view().tenants)
    sums[tenant.name] = int64_t(tenant.by_model.at("m").rows);
  EXPECT_EQ(sums["a"], 90);
  // Batches of 8 take two requests of three rows and a part of the next, of whoever it is.
  int mixed = 0;
  for (size_t i = 0; i < all.size(); ++i) mixed += i % 3 != 0 && all[i][0].batch > 3;
  EXPECT_GT(mixed, 10);
}

TEST(PoolMultiproc, SurvivesARowThatKills) {
  Bench bench("stand-in:ms=5", "cpu:2", 8, true, {{.name = "good"}, {.name = "bad"}});
  Answers answers;
  for (int i = 0; i < 200; ++i)
    bench.pool.submit(row_of(i == 60 ? -2 : float(i)), bench.pool.tenant(i == 60 ? "bad" : "good"),
                      answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[60][0].outcome.status, Status::Internal);
  EXPECT_EQ(answers.count(Status::Ok), 199u);
  for (size_t i = 0; i < all.size(); ++i)
    if (i != 60) {
      EXPECT_EQ(floats(all[i][0])[0], 2.0f * float(i));
    }
  int restarts = 0;
  for (const auto& replica : bench.pool.view().replicas) restarts += replica.restarts;
  EXPECT_LE(restarts, 2);
  EXPECT_GE(restarts, 1);
}

TEST(PoolMultiproc, GoesOnWhenWorkersAreKilledOrStopped) {
  Bench bench("stand-in:ms=2", "cpu:2", 4, true, {}, milliseconds(200));
  Answers answers;
  for (int round = 0; round < 6; ++round) {
    for (int i = 0; i < 60; ++i) bench.pool.submit(row_of(float(i)), 0, answers.next());
    const auto view = bench.pool.view();
    const auto& replica = view.replicas[size_t(round % 2)];
    if (replica.pid > 0) ::kill(replica.pid, round % 3 == 2 ? SIGSTOP : SIGKILL);
    answers.wait();
  }
  size_t wrong = 0;
  const auto& all = answers.wait();
  for (size_t i = 0; i < all.size(); ++i)
    wrong += all[i][0].outcome.ok() && floats(all[i][0])[0] != 2.0f * float(i % 60);
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(answers.count(Status::Ok), all.size());
}

TEST(PoolMultiproc, FreesAWorkerFromAnEndlessLoop) {
  Bench bench("stand-in:ms=1", "cpu:1", 4, true, {}, milliseconds(150));
  Answers answers;
  for (int i = 0; i < 20; ++i) bench.pool.submit(row_of(1), 0, answers.next());
  answers.wait();
  bench.pool.submit(row_of(-3), 0, answers.next());
  bench.pool.submit(row_of(5), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[20][0].outcome.status, Status::Internal);
  EXPECT_TRUE(all[21][0].outcome.ok());
}

TEST(PoolMultiproc, SaysSoWhenAModelCannotBeHealthy) {
  Bench bench("stand-in:ms=1", "cpu:1", 1, true);
  Answers answers;
  for (int i = 0; i < 4; ++i) bench.pool.submit(row_of(-2), 0, answers.next());
  bench.pool.submit(row_of(1), 0, answers.next());
  const auto& all = answers.wait();
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(all[size_t(i)][0].outcome.ok());
}

TEST(PoolMultiproc, IsHealthyAgainAfterItWasGivenUp) {
  Bench bench("stand-in:ms=1", "cpu:1", 1, true);
  for (int round = 0; round < 3; ++round) {
    Answers bad;
    for (int i = 0; i < 4; ++i) bench.pool.submit(row_of(-2), 0, bad.next());
    bad.wait();
  }
  while (!bench.pool.ready() && SteadyClock().now() < kSoon)
    std::this_thread::sleep_for(milliseconds(10));
  Answers good;
  bench.pool.submit(row_of(1), 0, good.next());
  EXPECT_EQ(good.count(Status::Ok), 1u);
}

TEST(PoolMultiproc, AnswersForAModelThatGoesWhileItsWorkersAreKilled) {
  Bench bench("stand-in:ms=20", "cpu:2", 1, true);
  Answers answers;
  for (int i = 0; i < 20; ++i) bench.pool.submit(row_of(1), 0, answers.next());
  bench.pool.unload("m");
  for (const auto& replica : bench.pool.view().replicas)
    if (replica.pid > 0) ::kill(replica.pid, SIGKILL);
  EXPECT_EQ(answers.count(Status::Ok), 20u);
}

TEST(Pool, AnswersForATenantWhoseDevicesAreTakenAway) {
  Bench bench("stand-in:ms=20", "cpu:2", 1, false,
              {{.name = "a", .devices = "cpu"}, {.name = "b"}});
  Answers answers;
  for (int i = 0; i < 12; ++i)
    bench.pool.submit(row_of(1), bench.pool.tenant(i % 2 ? "a" : "b"), answers.next());
  bench.pool.set_tenants({{.name = "b", .devices = "cpu:2"}});
  EXPECT_EQ(answers.count(Status::Ok) + answers.count(Status::Unavailable), 12u);
}

TEST(Pool, DoesNotSpinWhereADeviceIsKeptForOthers) {
  Bench bench("stand-in:ms=100", "cpu:2", 1, false,
              {{.name = "kept", .guaranteed = 0.5, .lendable = 0}, {.name = "b"}});
  Answers answers;
  const int b = bench.pool.tenant("b");
  timespec before = {}, after = {};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  for (int i = 0; i < 6; ++i) bench.pool.submit(row_of(1), b, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 6u);
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  EXPECT_LT(double(after.tv_sec - before.tv_sec) + 1e-9 * double(after.tv_nsec - before.tv_nsec),
            0.2);
}

TEST(Pool, StartsAtOnceOnIdleDevicesHoweverLongItWasWrongAboutCosts) {
  Bench bench("stand-in:row_ms=1,value_ms=1", "cpu:1", 1);
  Answers answers;
  bench.pool.submit(row_of(300), 0, answers.next());  // 300 times what it looked like
  answers.wait();
  const Time begun = SteadyClock().now();
  bench.pool.submit(row_of(1), 0, answers.next());
  answers.wait();
  EXPECT_LT(SteadyClock().now() - begun, milliseconds(100));
}

TEST(Pool, ReplacesAModelUnderLoadWithoutLosingARequest) {
  Bench bench("stand-in:ms=1");
  Answers answers;
  std::atomic<bool> over = false;
  std::jthread load([&] {
    while (!over) {
      bench.pool.submit(row_of(3), 0, answers.next());
      std::this_thread::yield();
      if (bench.pool.view().tenants[0].waiting > 200) answers.wait();
    }
  });
  for (int i = 0; i < 5; ++i)
    bench.pool.load_and_wait(
        {.name = "m", .path = "stand-in:ms=0.5", .devices = "cpu:2", .batch = 8}, seconds(20));
  over = true;
  load.join();
  EXPECT_EQ(answers.count(Status::Ok), answers.wait().size());
  EXPECT_THROW(bench.pool.load_and_wait({.name = "m", .path = "stand-in:no", .devices = "cpu:2"},
                                        seconds(20)),
               Error);
  EXPECT_TRUE(bench.pool.ready());
  EXPECT_TRUE(bench.pool.unload("m"));
  EXPECT_FALSE(bench.pool.find("m").has_value());
}

TEST(Pool, ChangesTenantsWhileItRuns) {
  Bench bench("stand-in:ms=1", "cpu:1", 8, false, {{.name = "a"}, {.name = "b"}});
  const int a = bench.pool.tenant("a");
  bench.pool.set_tenants({{.name = "b", .guaranteed = 0.5}, {.name = "c"}});
  Answers answers;
  bench.pool.submit(row_of(1), a, answers.next());
  bench.pool.submit(row_of(1), bench.pool.tenant("c"), answers.next());
  EXPECT_EQ(answers.wait()[0][0].outcome.status, Status::Forbidden);
  EXPECT_TRUE(answers.wait()[1][0].outcome.ok());
  EXPECT_THROW(
      bench.pool.set_tenants({{.name = "b", .guaranteed = 0.8}, {.name = "c", .guaranteed = 0.8}}),
      Error);
}

TEST(Pool, GivesATenantWorkersOfItsOwn) {
  Bench bench("stand-in:ms=2", "cpu:2", 1, false, {{.name = "a", .devices = "cpu"}, {.name = "b"}});
  Answers answers;
  for (int i = 0; i < 20; ++i)
    bench.pool.submit(row_of(1), bench.pool.tenant(i % 2 ? "a" : "b"), answers.next());
  const auto& all = answers.wait();
  std::set<int> of_a, of_b;
  for (size_t i = 0; i < all.size(); ++i) (i % 2 ? of_a : of_b).insert(all[i][0].replica);
  EXPECT_EQ(of_a.size(), 1u);
  EXPECT_EQ(of_b.size(), 1u);
  EXPECT_NE(of_a, of_b);
}

TEST(Pool, FinishesWhatItTookWhenItEnds) {
  Answers answers;
  Bench bench("stand-in:ms=3", "cpu:2", 2);
  for (int i = 0; i < 50; ++i) bench.pool.submit(row_of(1), 0, answers.next());
  EXPECT_TRUE(bench.pool.drain(kSoon));
  bench.pool.submit(row_of(1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 50u);
  EXPECT_EQ(answers.count(Status::Unavailable), 1u);
}

TEST(Pool, AnswersEverybodyWhenItIsDestroyed) {
  Answers answers;
  {
    Bench bench("stand-in:ms=100", "cpu:1", 1);
    for (int i = 0; i < 10; ++i) bench.pool.submit(row_of(1), 0, answers.next());
  }
  EXPECT_GE(answers.count(Status::Unavailable), 8u);
}

}  // namespace
}  // namespace yoke::serve
