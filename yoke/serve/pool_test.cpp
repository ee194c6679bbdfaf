// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/pool_test.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <sstream>

#include "yoke/base/rng.h"

namespace yoke::serve {
namespace {

// Not a test of its own: what the pools below start as their worker processes.
TEST(PoolWorker, ComputesForItsParent) {
  if (!std::getenv("YOKE_TEST_WORKER")) GTEST_SKIP() << "no parent";
  run_worker(net::Descriptor(3), open_stand_in);
}

TEST(Pool, GivesEachRequestItsOwnRows) {
  Bench bench("stand-in:ms=0.2");
  Answers answers;
  for (int i = 0; i < 200; ++i) {
    std::vector<std::array<float, 4>> rows;
    for (int j = 0; j <= i % 8; ++j) rows.push_back({float(8 * i + j), 1, 2, 3});
    bench.pool.submit(request_of(rows), 0, answers.next());
  }
  const auto& all = answers.wait();
  bool mixed = false;
  for (int i = 0; i < 200; ++i) {
    const auto& answer = all[size_t(i)].at(0);
    ASSERT_TRUE(answer.outcome.ok()) << answer.outcome.text;
    EXPECT_EQ(answer.outputs[0].shape, (Shape{i % 8 + 1, 4}));
    const auto values = floats(answer);
    ASSERT_EQ(values.size(), size_t(i % 8 + 1) * 4);
    for (size_t j = 0; j < values.size(); j += 4)
      EXPECT_EQ(values[j], 2.0f * float(8 * i) + float(j / 2));
    mixed |= answer.batch > i % 8 + 1;
  }
  EXPECT_TRUE(mixed) << "no batch had rows of two requests";
}

TEST(Pool, PutsTheRowsOfARequestInOrderThoughItsPartsCameOtherwise) {
  Gate gate, of_first_part;
  std::atomic<int> parts = 0;
  Bench bench(watched([&](const ReplicaSpec&, const std::vector<float>& rows) {
                gate.pass(rows);
                parts += std::ranges::count_if(
                             rows, [](float row) { return row > 10 && row < kHeld; }) > 0;
                if (rows.front() == 1) of_first_part.pass({kHeld});
              }),
              {.name = "m", .path = "stand-in:", .devices = "cpu:2", .batch = 4});
  Answers answers;
  for (int i = 0; i < 2; ++i) bench.pool.submit(row_of(kHeld), 0, answers.next());
  wait_until([&] { return gate.num_held() == 2; });
  // Behind one of the two three rows and a part of the next request, behind the other its rest.
  bench.pool.submit(request_of({{1}, {2}, {3}}), 0, answers.next());
  bench.pool.submit(request_of({{11}, {12}, {13}, {14}}), 0, answers.next());
  gate.open();
  wait_until([&] { return bench.pool.view().models[0].stats.batches == 3; });
  of_first_part.open();
  const auto& all = answers.wait();
  EXPECT_EQ(parts, 2);
  const auto values = floats(all[3].at(0));
  ASSERT_EQ(values.size(), 16u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(values[4 * i], 22 + 2 * float(i));
}

TEST(Pool, DoesNotJoinPiecesOfDifferentKinds) {
  Gate gate;
  Made model;
  model.on_run = [&](const Call& call, Outputs& outputs) {
    const auto& input = call.inputs[0];
    gate.pass({*reinterpret_cast<const float*>(input.data)});
    outputs.add(input.shape[0] == 4 ? Type::Int32 : Type::Fp32, input.shape);
  };
  model.told.batch = 4;
  Bench bench(made(model), {.name = "m", .devices = "cpu:1", .batch = 4});
  Answers answers;
  bench.pool.submit(row_of(kHeld), 0, answers.next());
  wait_until([&] { return gate.num_held() == 1; });
  bench.pool.submit(request_of({{1}, {2}, {3}}), 0, answers.next());
  bench.pool.submit(request_of({{4}, {5}}), 0, answers.next());  // of which one goes with these
  gate.open();
  const auto& all = answers.wait();
  EXPECT_TRUE(all[1][0].outcome.ok()) << all[1][0].outcome.text;
  EXPECT_EQ(all[2][0].outcome.status, Status::Internal);
  EXPECT_EQ(all[2][0].outcome.text,
            "model 'm' gave outputs of other types or shapes for a part of its rows than for the "
            "first ones");
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
  auto twice = row_of(1);
  twice.inputs.push_back(twice.inputs[0]);
  bench.pool.submit(std::move(twice), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[0][0].outcome.status, Status::Invalid);
  EXPECT_NE(all[0][0].outcome.text.find("wanted"), std::string::npos);
  EXPECT_EQ(all[1][0].outcome.status, Status::NotFound);
  EXPECT_EQ(all[1][0].outcome.text, "there is no model 'n'; there are: m/1");
  EXPECT_EQ(all[2][0].outcome.text, "model 'm', input 'x': wanted at most 8 rows, got FP32[9,4]");
  EXPECT_EQ(all[3][0].outcome.text, "model 'm', input 'x': wanted it once, got it 2 times");
}

TEST(Pool, RefusesMoreTensorsThanABatchHasPlacesFor) {
  Bench bench("stand-in:");
  const auto refusal = [&](std::vector<std::string> inputs) -> std::string {
    try {
      bench.pool.load_and_wait(
          {.name = "n", .path = "stand-in:", .devices = "cpu:1", .input = std::move(inputs)},
          seconds(60));
      return {};
    } catch (const Error& error) {
      return error.what();
    }
  };
  std::vector<std::string> inputs;
  for (int i = 0; i < 64; ++i) inputs.push_back(cat("x", i, ":FP32[-1,4]"));
  EXPECT_EQ(refusal(inputs), "");
  inputs.emplace_back("x64:FP32[-1,4]");
  EXPECT_EQ(refusal(inputs),
            "the model has 65 inputs, wanted at most 64; join some of them in the model");
  EXPECT_EQ(refusal({"x:FP32[-1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"}),
            "the model's 'x' has 17 dimensions, wanted at most 16");
  Answers answers;
  auto request = row_of(1);
  request.inputs.resize(65, request.inputs[0]);
  bench.pool.submit(std::move(request), 0, answers.next());
  request = row_of(1);
  request.outputs.resize(65, {.name = "y"});
  bench.pool.submit(std::move(request), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[0][0].outcome.text, "model 'm': wanted at most 64 inputs, got 65");
  EXPECT_EQ(all[1][0].outcome.text, "model 'm': wanted at most 64 outputs, got 65");
}

TEST(Pool, RefusesASequenceThatNoNameCanBe) {
  Bench bench(Bench::options(),
              {.name = "m", .path = "stand-in:", .devices = "cpu:1", .stateful = true});
  Answers answers;
  for (const auto& name : {std::string("a\0x", 3), std::string(201, 'a')})
    bench.pool.submit(row_of(1, {.sequence = name, .sequence_start = true}), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Invalid), 2u);
}

TEST(Pool, WantsSizesOfOneNameToBeEqual) {
  Bench bench(Bench::options(), {.name = "m",
                                 .path = "stand-in:",
                                 .devices = "cpu:1",
                                 .input = {"x:FP32[-1,n]", "z:FP32[-1,2,n]"}});
  Answers answers;
  const std::string data(64, 0);
  for (const int64_t n : {4, 3}) {
    Request request{.model = "m"};
    request.inputs = {
        {.name = "x", .shape = {1, 4}, .data = std::string_view(data).substr(0, 16)},
        {.name = "z", .shape = {1, 2, n}, .data = std::string_view(data).substr(0, size_t(8 * n))}};
    bench.pool.submit(std::move(request), 0, answers.next());
  }
  const auto& all = answers.wait();
  EXPECT_TRUE(all[0][0].outcome.ok()) << all[0][0].outcome.text;
  EXPECT_EQ(all[1][0].outcome.status, Status::Invalid);
  EXPECT_EQ(all[1][0].outcome.text,
            "model 'm', input 'z': wanted n = 4 as in input 'x', got FP32[1,2,3]");
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
  Gate gate;
  Bench bench(held_at(gate), {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 1});
  expect_within(milliseconds(250), [&] {
    Answers answers;
    const Time begun = SteadyClock().now();
    for (int i = 0; i < 2; ++i)
      bench.pool.submit(row_of(kHeld, {.timeout = milliseconds(30)}), 0, answers.next());
    EXPECT_EQ(answers.count(Status::Deadline), 2u);
    return SteadyClock().now() - begun;
  });
  gate.open();
}

TEST(Pool, RefusesBeyondTheTenantsBound) {
  Gate gate;
  Bench bench(held_at(gate), {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 1},
              {{.name = "a", .max_queue = 3}, {.name = "b"}});
  Answers answers;
  const int a = bench.pool.tenant("a"), b = bench.pool.tenant("b");
  for (int i = 0; i < 5; ++i) bench.pool.submit(row_of(kHeld), a, answers.next());
  bench.pool.submit(row_of(kHeld), b, answers.next());
  gate.open();
  const auto& all = answers.wait();
  EXPECT_EQ(answers.count(Status::Exhausted), 2u);
  EXPECT_EQ(all[4][0].outcome.status, Status::Exhausted);
  EXPECT_GE(all[4][0].outcome.retry_after, 1);
  EXPECT_TRUE(all[5][0].outcome.ok());
}

TEST(Pool, TakesTheBetterPriorityFirstOfWhatWaits) {
  Gate gate;
  Mutex mutex;
  std::vector<float> order;
  Bench bench(watched([&](const ReplicaSpec&, const std::vector<float>& rows) {
                gate.pass(rows);
                const MutexLock lock(mutex);
                order.push_back(rows[0]);
              }),
              {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 1});
  Answers answers;
  bench.pool.submit(row_of(kHeld), 0, answers.next());
  wait_until([&] { return gate.num_held() == 1; });
  const std::vector<uint64_t> priorities{0, 0, 7, 1, 7, 0, 1};
  for (size_t i = 0; i < priorities.size(); ++i)
    bench.pool.submit(row_of(float(i), {.priority = priorities[i]}), 0, answers.next());
  gate.open();
  EXPECT_EQ(answers.count(Status::Ok), 8u);
  const MutexLock lock(mutex);
  EXPECT_EQ(order, (std::vector<float>{kHeld, 0, 3, 6, 2, 4, 1, 5}));  // the first 0 was staged
}

TEST(Pool, CountsTheAnswersThatAStreamHoldsBackAsWaiting) {
  Gate gate;
  Bench bench(held_at(gate), {.name = "m", .path = "stand-in:", .devices = "cpu:2", .batch = 1},
              {{.name = "a", .max_queue = 3}});
  Answers answers;
  const int a = bench.pool.tenant("a");
  bench.pool.submit(row_of(kHeld, {.stream = "s"}), a, answers.next());
  for (int i = 0; i < 2; ++i) bench.pool.submit(row_of(1, {.stream = "s"}), a, answers.next());
  wait_until([&] { return bench.pool.view().models[0].stats.success.count == 2; });
  bench.pool.submit(row_of(2), a, answers.next());
  gate.open();
  EXPECT_EQ(answers.count(Status::Ok), 3u);
  EXPECT_EQ(answers.wait()[3][0].outcome.status, Status::Exhausted);
  wait_until([&] { return bench.pool.view().tenants[0].waiting == 0; });
  bench.pool.submit(row_of(2), a, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 4u);
}

TEST(Pool, MovesWhatIsStagedToADeviceThatFallsIdleSooner) {
  std::array<Gate, 2> gates;
  Bench bench(watched([&](const ReplicaSpec& spec, const std::vector<float>& rows) {
                gates[size_t(spec.number)].pass(rows);
              }),
              {.name = "m", .path = "stand-in:", .devices = "cpu:2", .batch = 1});
  Answers held, others;
  for (int i = 0; i < 2; ++i) bench.pool.submit(row_of(kHeld), 0, held.next());
  wait_until([&] { return gates[0].num_held() == 1 && gates[1].num_held() == 1; });
  for (int i = 0; i < 2; ++i) bench.pool.submit(row_of(1), 0, others.next());  // one behind each
  gates[1].open();
  for (const auto& answer : others.wait()) EXPECT_EQ(answer.at(0).replica, 1);
  gates[0].open();
  EXPECT_EQ(held.count(Status::Ok), 2u);
}

TEST(Pool, RefusesBeyondTheBytesThatATenantMayHaveWaiting) {
  Gate gate;
  auto options = held_at(gate);
  options.max_queue_bytes = 80;  // a row has 16, and its answer
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 8},
              {{.name = "a"}, {.name = "b"}});
  Answers answers;
  const int a = bench.pool.tenant("a"), b = bench.pool.tenant("b");
  for (int i = 0; i < 3; ++i) bench.pool.submit(row_of(kHeld), a, answers.next());
  bench.pool.submit(request_of(std::vector<std::array<float, 4>>(4)), b, answers.next());
  gate.open();
  const auto& all = answers.wait();
  EXPECT_TRUE(all[0][0].outcome.ok() && all[1][0].outcome.ok());
  EXPECT_EQ(all[2][0].outcome.status, Status::Exhausted);
  EXPECT_EQ(all[2][0].outcome.text,
            "tenant 'a' has 96 bytes of requests and answers waiting with this one, of at most 80; "
            "serve.max_queue_mb makes it more");
  EXPECT_GE(all[2][0].outcome.retry_after, 1);
  EXPECT_TRUE(all[3][0].outcome.ok()) << "one alone would be refused for ever";
  const auto waits = [](const TenantView& tenant) { return tenant.waiting > 0; };
  wait_until([&] { return std::ranges::none_of(bench.pool.view().tenants, waits); });
  for (int i = 0; i < 2; ++i) bench.pool.submit(row_of(1), a, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 5u) << "what was answered counts no more";
}

// A model with state, of which a sequence lasts a moment.
struct WithSequences : Bench {
  explicit WithSequences(const std::string& path, double idle_s = 0.05)
      : Bench(options(), {.name = "m",
                          .path = path,
                          .devices = "cpu:2",
                          .batch = 1,
                          .stateful = true,
                          .sequence_idle_s = idle_s}) {}
  size_t sequences() const {
    size_t sum = 0;
    for (const auto& replica : pool.view().replicas) sum += replica.sequences;
    return sum;
  }
};

TEST(Pool, ForgetsASequenceThatNobodyUses) {
  WithSequences bench("stand-in:ms=1");
  Answers answers;
  for (const char* name : {"s", "t"})
    bench.pool.submit(row_of(1, {.sequence = name, .sequence_start = true}), 0, answers.next());
  answers.wait();
  wait_until([&] { return bench.sequences() == 0; });
  bench.pool.submit(row_of(1, {.sequence = "s"}), 0, answers.next());
  bench.pool.submit(row_of(1, {.sequence = "t", .sequence_start = true}), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[2][0].outcome.status, Status::Invalid);
  EXPECT_EQ(all[2][0].outcome.text,
            "model 'm' knows no sequence 's': wanted sequence_start with its first request, and "
            "the next within sequence_idle_s = 0.05 s");
  EXPECT_TRUE(all[3][0].outcome.ok());
}

TEST(Pool, EndsASequenceWhereItBeganThoughItsModelWasReplaced) {
  WithSequences bench("stand-in:", 60);
  const auto ask = [&](const char* name, bool start = false, bool end = false) {
    Answers answers;
    bench.pool.submit(row_of(1, {.sequence = name, .sequence_start = start, .sequence_end = end}),
                      0, answers.next());
    return answers.wait()[0][0];
  };
  const auto replace = [&](double idle_s) {
    bench.pool.load_and_wait({.name = "m",
                              .path = "stand-in:",
                              .devices = "cpu:2",
                              .batch = 1,
                              .stateful = true,
                              .sequence_idle_s = idle_s},
                             seconds(20));
  };
  const int first = ask("s", true).replica, second = ask("t", true).replica;
  replace(60);
  EXPECT_EQ(ask("s").replica, first);
  EXPECT_EQ(ask("t").replica, second);
  EXPECT_GT(ask("t", true).replica, 1) << "it began anew";
  EXPECT_GT(ask("t").replica, 1);
  EXPECT_EQ(ask("u").outcome.status, Status::Invalid);
  EXPECT_EQ(bench.pool.view().replicas.size(), 4u);
  EXPECT_TRUE(ask("s", false, true).outcome.ok());
  EXPECT_EQ(ask("s").outcome.status, Status::Invalid);
  EXPECT_TRUE(ask("t", false, true).outcome.ok());
  replace(0.05);
  ask("v", true);
  replace(60);  // its sequences are soon forgotten
  wait_until([&] { return bench.pool.view().replicas.size() == 2; });
  ask("w", true);
  bench.pool.unload("m");
  wait_until([&] { return bench.pool.view().replicas.empty(); });
}

TEST(Pool, KeepsASequenceWhoseRequestTakesLong) {
  WithSequences bench("stand-in:value_ms=1");
  Answers answers;
  const auto second = answers.next();
  const auto last = answers.next();
  // Far longer than a sequence may be idle, and than the pool takes to look for those that are.
  bench.pool.submit(row_of(1500, {.sequence = "s", .sequence_start = true}), 0, [&](Answer answer) {
    second(std::move(answer));
    bench.pool.submit(row_of(1, {.sequence = "s"}), 0, last);
  });
  EXPECT_EQ(answers.count(Status::Ok), 2u);
}

TEST(Pool, FailsTheGuiltyRowAlone) {
  Bench bench("stand-in:ms=2", "cpu:1", 8);
  Answers answers;
  for (int i = 0; i < 64; ++i) bench.pool.submit(row_of(i % 16 == 5 ? -1 : 1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Internal), 4u);
  EXPECT_EQ(answers.count(Status::Ok), 60u);
}

TEST(Pool, TellsATenantOfItsOwnRowsAlone) {
  const auto blame = [](const std::vector<float>& rows) {
    for (const float row : rows)
      if (row < 0) fail(Kind::Usage, "a row begins with ", row);
  };
  for (const bool pure : {true, false}) {
    Gate gate;
    Bench bench(watched([&](const ReplicaSpec&, const std::vector<float>& rows) {
                  gate.pass(rows);
                  blame(rows);
                }),
                {.name = "m",
                 .path = pure ? "stand-in:" : "stand-in:pure=0",
                 .devices = "cpu:1",
                 .batch = 16},
                {{.name = "a"}, {.name = "b"}});
    Answers answers;
    bench.pool.submit(row_of(kHeld), bench.pool.tenant("a"), answers.next());
    wait_until([&] { return gate.num_held() == 1; });
    for (int i = 1; i <= 12; ++i)  // all of which fail
      bench.pool.submit(row_of(float(-i)), bench.pool.tenant(i % 2 ? "a" : "b"), answers.next());
    gate.open();
    const auto& all = answers.wait();
    int told = 0;
    for (size_t i = 1; i <= 12; ++i) {
      const auto& text = all[i][0].outcome.text;
      const bool own = text == cat("model 'm' failed: a row begins with -", i);
      EXPECT_TRUE(own || text == "model 'm' failed: what it said may be about rows of others")
          << text;
      told += own;
    }
    EXPECT_EQ(told, pure ? 8 : 0);
  }
}

TEST(Pool, KeepsExclusiveTenantsOutOfMixedBatches) {
  Gate gate;
  Mutex mutex;
  std::vector<std::set<float>> batches;  // of whom each was
  Bench bench(watched([&](const ReplicaSpec&, const std::vector<float>& rows) {
                gate.pass(rows);
                const MutexLock lock(mutex);
                batches.emplace_back(rows.begin(), rows.end());
              }),
              {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 8},
              {{.name = "a", .exclusive_batch = true}, {.name = "b"}, {.name = "c"}});
  Answers answers;
  bench.pool.submit(row_of(kHeld), bench.pool.tenant("b"), answers.next());
  wait_until([&] { return gate.num_held() == 1; });
  for (int i = 0; i < 30; ++i)
    for (const auto& [name, value] : std::map<std::string, float>{{"a", 1}, {"b", 2}, {"c", 3}})
      bench.pool.submit(request_of({{value}, {value}, {value}}), bench.pool.tenant(name),
                        answers.next());
  gate.open();
  EXPECT_EQ(answers.count(Status::Ok), 91u);
  std::map<std::string, int64_t> sums;
  for (const auto& tenant : bench.pool.view().tenants)
    sums[tenant.name] = int64_t(tenant.by_model.at("m").rows);
  EXPECT_EQ(sums["a"], 90);
  const MutexLock lock(mutex);
  for (const auto& of : batches) EXPECT_TRUE(!of.contains(1) || of.size() == 1);
  // Batches of 8 take two requests of three rows and a part of the next, of whoever it is.
  EXPECT_GT(std::ranges::count(batches, std::set<float>{2, 3}), 3);
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
  Bench bench("stand-in:ms=2", "cpu:2", 4, true, {}, seconds(2));
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
  std::atomic<bool> ready = true;
  bench.pool.submit(row_of(1), 0, [&, next = answers.next()](Answer answer) {
    ready = bench.pool.ready();  // no worker can come back before this returns
    next(std::move(answer));
  });
  const auto& all = answers.wait();
  // Two are tried twice each, which makes four deaths; the rest is not tried.
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(all[i][0].outcome.status, Status::Internal);
  for (size_t i = 2; i < 5; ++i) {
    EXPECT_EQ(all[i][0].outcome.status, Status::Unavailable);
    EXPECT_EQ(all[i][0].outcome.retry_after, 5);
    EXPECT_NE(all[i][0].outcome.text.find("no healthy replica: signal 9"), std::string::npos)
        << all[i][0].outcome.text;
  }
  EXPECT_FALSE(ready);
}

TEST(PoolMultiproc, IsHealthyAgainAfterItWasGivenUp) {
  Bench bench("stand-in:ms=1", "cpu:1", 1, true);
  for (int round = 0; round < 3; ++round) {
    Answers bad;
    for (int i = 0; i < 4; ++i) bench.pool.submit(row_of(-2), 0, bad.next());
    bad.wait();
  }
  wait_until([&] { return bench.pool.ready(); });
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
  expect_within(milliseconds(100), [] {
    Bench bench("stand-in:row_ms=1,value_ms=1", "cpu:1", 1);
    Answers answers;
    bench.pool.submit(row_of(300), 0, answers.next());  // 300 times what it looked like
    answers.wait();
    const Time begun = SteadyClock().now();
    bench.pool.submit(row_of(1), 0, answers.next());
    answers.wait();
    return SteadyClock().now() - begun;
  });
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

TEST(Pool, StaysReadyWhileSomethingIsLoadedBesideIt) {
  std::promise<void> promise;
  const auto go_on = promise.get_future().share();
  auto options = Bench::options();
  options.workers.open = [go_on](const ReplicaSpec& spec) {
    if (spec.path != "stand-in:") go_on.wait();
    return open_stand_in(spec);
  };
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:1"});
  std::jthread loads([&] {
    EXPECT_THROW(
        bench.pool.load_and_wait(
            {.name = "m", .path = "stand-in:no", .version = "2", .devices = "cpu:1"}, seconds(60)),
        Error);
  });
  wait_until([&] { return bench.pool.view().models.size() == 2; });
  EXPECT_TRUE(bench.pool.ready());
  EXPECT_TRUE(bench.pool.all_loaded());
  promise.set_value();
  loads.join();
  EXPECT_TRUE(bench.pool.ready());
}

TEST(Pool, KeepsNothingOfAModelThatIsGone) {
  Bench bench("stand-in:ms=1");
  Answers answers;
  for (int i = 0; i < 20; ++i) bench.pool.submit(row_of(1), 0, answers.next());
  const std::weak_ptr<const Facts> facts = bench.pool.find("m")->facts;
  EXPECT_FALSE(facts.expired());
  EXPECT_EQ(answers.count(Status::Ok), 20u);
  EXPECT_TRUE(bench.pool.unload("m"));
  wait_until([&] { return facts.expired(); });
  const auto view = bench.pool.view();
  EXPECT_EQ(view.devices, 0);
  EXPECT_TRUE(view.ready) << "nothing is to be served";
  std::ostringstream metrics;
  bench.metrics.write_prometheus(metrics);
  EXPECT_EQ(metrics.str().find("replica=\""), std::string::npos) << metrics.str();
}

TEST(Pool, CountsWhatKeepsARequestInMemory) {
  Gate gate;
  auto options = held_at(gate);
  options.max_queue_bytes = 1000;
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:1"});
  Answers answers;
  for (const uint64_t bytes : {600, 300, 300}) {
    auto request = row_of(kHeld);
    request.held_bytes = bytes;
    bench.pool.submit(std::move(request), 0, answers.next());
  }
  gate.open();
  const auto& all = answers.wait();
  EXPECT_TRUE(all[1][0].outcome.ok());
  EXPECT_EQ(
      all[2][0].outcome.text,
      "tenant 'default' has 1248 bytes of requests and answers waiting with this one, of at most "
      "1000; "
      "serve.max_queue_mb makes it more");
}

TEST(Pool, CountsTheAnswersThatAreExpected) {
  Made model;
  model.told.batch = 8;
  model.on_run = [](const Call& call, Outputs& outputs) {
    outputs.add(Type::Fp32, {call.inputs[0].shape[0], 1000});
  };
  for (const bool told : {true, false}) {
    if (told) model.told.outputs = {plan::parse_port("y:FP32[-1,1000]")};
    if (!told) model.told.outputs = {};
    auto options = made(model);
    options.max_queue_bytes = 9000;  // two rows, with their answers
    Bench bench(options, {.name = "m", .devices = "cpu:1"});
    Answers answers;
    bench.pool.submit(row_of(1), 0, answers.next());
    answers.wait();
    bench.pool.submit(request_of({{1}, {2}}), 0, answers.next(), {}, Pool::When::Later);
    bench.pool.submit(row_of(3), 0, answers.next(), {}, Pool::When::Later);
    bench.pool.dispatch();
    const auto& all = answers.wait();
    EXPECT_TRUE(all[1][0].outcome.ok()) << all[1][0].outcome.text;
    EXPECT_EQ(all[2][0].outcome.text,
              "tenant 'default' has 12048 bytes of requests and answers waiting with this one, of "
              "at most 9000; serve.max_queue_mb makes it more");
  }
}

TEST(Pool, ComputesFewerRowsAtOnceWhereTheirOutputsHaveNoRoom) {
  std::atomic<int64_t> most = 0, calls = 0;
  std::atomic<size_t> each = 1 << 20;  // bytes of a row's output; of a slab there are 4 MiB
  Made model;
  model.on_run = [&](const Call& call, Outputs& outputs) {
    const int64_t rows = call.inputs[0].shape[0];
    ++calls;
    for (int64_t i = 0; i < rows; ++i) {
      float first = 0;
      std::memcpy(&first, call.inputs[0].data + 16 * i, sizeof(first));
      if (first < 0) fail(Kind::Usage, "a row begins with ", first);
    }
    const auto out = outputs.add(Type::Fp32, {rows, int64_t(each / 4)});
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(&out[size_t(i) * each], call.inputs[0].data + 16 * i, sizeof(float));
    most = std::max<int64_t>(most, rows);
  };
  Bench bench(made(model), {.name = "m", .devices = "cpu:1"});
  const auto ask = [&](const std::vector<std::array<float, 4>>& rows) {
    Answers answers;
    bench.pool.submit(request_of(rows), 0, answers.next());
    auto answer = answers.wait()[0][0];
    if (answer.outcome.ok()) {
      const auto values = floats(answer);
      EXPECT_EQ(values.size(), rows.size() * each / 4);
      for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(values[i * each / 4], rows[i][0]);
    }
    return answer.outcome;
  };
  const std::vector<std::array<float, 4>> eight{{1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}};
  EXPECT_TRUE(ask(eight).ok());
  EXPECT_EQ(most, 3);
  calls = 0;
  EXPECT_TRUE(ask(eight).ok());
  EXPECT_EQ(calls, 3) << "it knows by now";
  each = 3 << 20;
  EXPECT_TRUE(ask(eight).ok());
  EXPECT_EQ(ask({{1}, {-2}, {3}}).text, "model 'm' failed: a row begins with -2");
  each = 5 << 20;
  EXPECT_EQ(ask({{1}}).text,
            "model 'm' failed: the model's outputs take more than the 4 MiB that there are; "
            "serve.slab_mb makes it more");
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, 0);
}

TEST(Pool, SaysOfAModelThatIsOnItsWayThatItIsNotReady) {
  Gate gate;
  auto options = Bench::options();
  options.workers.open = [&](const ReplicaSpec& spec) {
    if (spec.path == "stand-in:ms=0") gate.pass({kHeld});
    return open_stand_in(spec);
  };
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:1"});
  bench.pool.load({.name = "n", .path = "stand-in:ms=0", .devices = "cpu:1"});
  Answers answers;
  auto request = row_of(1);
  request.model = "n";
  bench.pool.submit(request, 0, answers.next());
  EXPECT_EQ(answers.wait()[0][0].outcome.status, Status::Unavailable);
  EXPECT_EQ(answers.wait()[0][0].outcome.text, "model 'n' is not ready yet");
  EXPECT_EQ(bench.pool.find("n", "")->state, ModelState::Loading);
  EXPECT_FALSE(bench.pool.find("o", ""));
  gate.open();
  bench.pool.wait_ready(seconds(60));
  bench.pool.submit(request, 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 1u);
}

TEST(Pool, HearsAllOfWhatAWorkerTellsOfItsParts) {
  Made model;
  model.parts = cat("[\"", std::string(300'000, 'x'), "\"]");  // more than a message has
  model.on_run = [](const Call& call, Outputs& outputs) {
    outputs.add(Type::Fp32, call.inputs[0].shape);
  };
  Bench bench(made(model), {.name = "m", .devices = "cpu:1"});
  for (int i = 0; i < 2; ++i) {
    Answers answers;
    bench.pool.submit(row_of(1), 0, answers.next());
    answers.wait();
    wait_until([&] { return bench.pool.view().replicas[0].parts == model.parts; });
  }
}

TEST(Pool, CountsRefusalsThatWaitForTheirTurn) {
  Gate gate;
  Bench bench(held_at(gate), {.name = "m", .path = "stand-in:", .devices = "cpu:1"},
              {{.name = "a", .max_queue = 3}});
  const int a = bench.pool.tenant("a");
  Answers answers;
  bench.pool.submit(row_of(kHeld, {.stream = "s"}), a, answers.next());
  for (int i = 0; i < 4; ++i) {
    auto wrong = row_of(1, {.stream = "s"});
    wrong.inputs[0].shape = {4};
    bench.pool.submit(std::move(wrong), a, answers.next());
  }
  EXPECT_EQ(bench.pool.view().tenants[0].waiting, 3u);
  gate.open();
  EXPECT_EQ(answers.order(), (std::vector<size_t>{3, 4, 0, 1, 2}));
  EXPECT_EQ(answers.count(Status::Invalid), 4u);
  wait_until([&] { return bench.pool.view().tenants[0].waiting == 0; });
}

TEST(Pool, AnswersAfterTheLastPieceOfAText) {
  Made model;
  model.told.has_words = true;
  std::promise<void> began;
  std::atomic<bool> telling = false;
  model.on_prompt = [] {};
  Bench bench(made(model), {.name = "m", .devices = "cpu:1"});
  Answers answers;
  std::string order;
  bench.pool.submit(
      {.model = "m", .parameters = {.stream = "s"}, .prompt = Prompt{.text = "once"}}, 0,
      [&, then = answers.next()](Answer answer) {
        order += "answer";
        then(std::move(answer));
      },
      [&](std::string_view) {
        telling = true;
        began.get_future().wait();
        order += "text ";
      });
  // What is refused while the text is on its way goes behind it.
  wait_until([&] { return telling.load(); });
  bench.pool.submit({.model = "none", .parameters = {.stream = "s"}}, 0, answers.next());
  began.set_value();
  EXPECT_EQ(answers.order(), (std::vector<size_t>{0, 1}));
  EXPECT_EQ(order, "text answer");
}

TEST(PoolMultiproc, HoldsNobodyUpWhileItLogs) {
  std::atomic<int> lines = 0, held_up = 0;
  std::atomic<Bench*> asked = nullptr;
  std::vector<std::jthread> threads;  // of the one that logs alone
  Bench bench(
      Bench::options(true), {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 1}, {},
      {.sink = [&](std::string_view line) {
        if (!asked || line.find("ended: signal 9") == line.npos) return;
        auto answered = std::make_shared<std::promise<void>>();
        threads.emplace_back([&asked, answered] {
          asked.load()->pool.view();
          answered->set_value();
        });
        held_up += answered->get_future().wait_for(seconds(10)) != std::future_status::ready;
        ++lines;
      }});
  asked = &bench;
  Answers answers;
  bench.pool.submit(row_of(-2), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Internal), 1u);
  wait_until([&] { return lines >= 2; });
  EXPECT_EQ(lines, 2);  // it is tried again
  EXPECT_EQ(held_up, 0);
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
  EXPECT_TRUE(bench.pool.drain(soon()));
  bench.pool.submit(row_of(1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 50u);
  EXPECT_EQ(answers.count(Status::Unavailable), 1u);
  EXPECT_GE(answers.wait()[50][0].outcome.retry_after, 1);
}

TEST(Pool, AnswersEverybodyWhenItIsDestroyed) {
  Answers answers;
  {
    Bench bench("stand-in:ms=500", "cpu:1", 1);
    for (int i = 0; i < 10; ++i) bench.pool.submit(row_of(1), 0, answers.next());
  }
  EXPECT_GE(answers.count(Status::Unavailable), 8u);
  EXPECT_EQ(answers.count(Status::Unavailable) + answers.count(Status::Ok), 10u);
}

}  // namespace
}  // namespace yoke::serve
