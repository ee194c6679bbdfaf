// SPDX-License-Identifier: Apache-2.0
// Workers that die, fail or lie, and what becomes of their requests.
#include <signal.h>
#include <unistd.h>

#include <regex>
#include <sstream>
#include <stdexcept>

#include "yoke/serve/channel.h"
#include "yoke/serve/control.h"
#include "yoke/serve/pool_test.h"

namespace yoke::serve {
namespace {

TEST(PoolLivesMultiproc, DoesNotTryAgainWhatAnImpureModelHadBegun) {
  Bench bench("stand-in:pure=0", "cpu:1", 1, true);
  Answers answers;
  bench.pool.submit(row_of(-2), 0, answers.next());
  bench.pool.submit(row_of(5), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[0][0].outcome.status, Status::Internal);
  EXPECT_EQ(all[0][0].outcome.text,
            "the worker that computed it ended; it was not tried again, as model 'm' may write its "
            "own state or mix rows");
  EXPECT_TRUE(all[1][0].outcome.ok()) << "it had not begun this one";
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, 1);
}

TEST(PoolLivesMultiproc, FindsADeadWorkerAtOnceAndChargesNobodyForWhatWasLost) {
  expect_within(milliseconds(300), [] {
    Bench bench("stand-in:ms=800", "cpu:1", 1, true, {}, std::chrono::minutes(5));
    Answers answers;
    bench.pool.submit(row_of(1), 0, answers.next());
    const auto first = [&] { return bench.pool.view().replicas[0]; };
    wait_until([&] { return first().computing == 1; });
    std::this_thread::sleep_for(milliseconds(100));
    const Time killed = SteadyClock().now();
    ::kill(first().pid, SIGKILL);
    wait_until([&] { return first().restarts == 1; });
    const Duration took = SteadyClock().now() - killed;
    EXPECT_EQ(answers.count(Status::Ok), 1u) << "it was tried again";
    const auto& timing = answers.wait()[0][0].timing;
    const std::chrono::duration<double> used = timing.input + timing.compute + timing.output;
    EXPECT_GE(used.count(), 0.8);
    EXPECT_NEAR(bench.pool.view().tenants[0].device_s, used.count(), 1e-6) << "none for the first";
    return took;
  });
}

TEST(PoolLivesMultiproc, SoonFindsAWorkerThatDoesNotTakeABatchAndSaysForHowLong) {
  Mutex mutex;
  std::string said;
  Bench bench(Bench::options(true, seconds(20)),
              {.name = "m", .path = "stand-in:", .devices = "cpu:1"}, {},
              {.sink = [&](std::string_view line) {
                const MutexLock lock(mutex);
                if (line.find("stuck for") != line.npos) said += line;
              }});
  Answers answers;
  ::kill(bench.pool.view().replicas[0].pid, SIGSTOP);
  const Time begun = SteadyClock().now();
  bench.pool.submit(row_of(1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 1u);
  EXPECT_GE(SteadyClock().now() - begun, seconds(2));
  EXPECT_LT(SteadyClock().now() - begun, seconds(10));
  const MutexLock lock(mutex);
  EXPECT_TRUE(std::regex_search(said, std::regex(R"(it was stuck for [23](\.\d+)? s)"))) << said;
}

TEST(PoolLives, GivesABatchThatWasTakenTheWholeOfItsTime) {
  std::atomic<bool> slow = false;
  Made model;
  model.on_run = [&](const Call& call, Outputs& outputs) {
    if (slow) std::this_thread::sleep_for(milliseconds(3500));
    outputs.add(Type::Fp32, call.inputs[0].shape);
  };
  Bench bench(made(model, seconds(20)), {.name = "m", .devices = "cpu:1"});
  Answers answers;
  bench.pool.submit(row_of(1), 0, answers.next());
  answers.wait();
  slow = true;
  bench.pool.submit(row_of(1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 2u);
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, 0);
}

// Not a test of its own: a worker that gives the rows of its first batch to another owner.
TEST(PoolWorker, MistakesTheOwnersOfRows) {
  if (!std::getenv("YOKE_TEST_WORKER")) GTEST_SKIP() << "no parent";
  const net::Descriptor line(3);
  auto hello = receive_message(line.get(), soon());
  const Channel channel(std::move(hello->files.at(0)));
  send_message(line.get(), "ready " + to_json(open_stand_in(parse_spec(hello->text))->facts()));
  const Slab& slab = channel.slab(0);
  auto& header = *slab.header;
  wait_until([&] { return SlabState::of(header.state.load()).phase == Phase::Open; });
  const uint32_t rows = SlabState::of(header.state.load()).rows;
  std::copy_n(slab.owners, rows, slab.owners_back);
  ++slab.owners_back[rows - 1];
  header.outputs[0] = header.inputs[0];
  header.outputs[0].bytes *= rows;
  header.num_outputs = 1;
  header.state.store(SlabState{Phase::Done, rows}.word());
  const uint64_t one = 1;
  EXPECT_EQ(::write(hello->files.at(1).get(), &one, sizeof(one)), ssize_t(sizeof(one)));
  receive_message(line.get(), soon());  // until the parent is gone
}

TEST(PoolLivesMultiproc, GivesNobodyRowsThatCameBackWithAnotherOwner) {
  auto options = Bench::options(true);
  options.workers.command[1] = "--gtest_filter=PoolWorker.MistakesTheOwnersOfRows";
  std::atomic<int> lines = 0;
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 2}, {},
              {.sink = [&](std::string_view line) {
                lines += line.find("a row came back with another owner") != line.npos;
              }});
  Answers answers;
  bench.pool.submit(request_of({{1}, {2}}), 0, answers.next());
  const auto& all = answers.wait();
  EXPECT_EQ(all[0][0].outcome.status, Status::Internal);
  EXPECT_EQ(all[0][0].outcome.text, "its rows came back in disorder");
  EXPECT_TRUE(all[0][0].outputs.empty());
  EXPECT_EQ(lines, 1);  // it is told before the answer goes out
}

TEST(PoolLives, WaitsLongerEachTimeForAWorkerThatEndsAtItsStart) {
  Mutex mutex;
  std::vector<Time> starts;
  std::atomic<bool> ended = false, was_ready = false;
  std::atomic<Bench*> asked = nullptr;
  Runner* first = nullptr;
  auto options = watched([&](const ReplicaSpec&, const std::vector<float>&) {
    if (!ended.exchange(true)) throw Fatal{"its device is lost"};
  });
  options.workers.open = [&, open = options.workers.open](const ReplicaSpec& spec) {
    const MutexLock lock(mutex);
    starts.push_back(SteadyClock().now());
    if (ended && asked.load()->pool.ready()) was_ready = true;
    if (starts.size() == 2 || starts.size() == 3) fail(Kind::Device, "there is no device");
    auto opened = open(spec);
    if (starts.size() == 1) first = opened.get();
    return opened;
  };
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:1", .batch = 1});
  asked = &bench;
  EXPECT_TRUE(bench.pool.ready());
  Answers answers;
  bench.pool.submit(row_of(1), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 1u);
  EXPECT_TRUE(bench.pool.ready());
  EXPECT_FALSE(was_ready) << "while it had no worker";
  const MutexLock lock(mutex);
  ASSERT_EQ(starts.size(), 4u);
  EXPECT_GE(starts[2] - starts[1], milliseconds(400));
  EXPECT_GE(starts[3] - starts[2], milliseconds(800));
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, 3);
  delete first;  // its worker has left it as it was, since the error was fatal
}

TEST(PoolLives, TakesNoLongPromptForStuckAsShortOnesWereQuick) {
  Made model;
  model.on_prompt = [] { std::this_thread::sleep_for(seconds(2)); };
  model.told.has_words = true;
  model.told.longest_s = 1e-3;
  Bench bench(made(model, milliseconds(500)), {.name = "m", .devices = "cpu:1"});
  Answers answers;
  bench.pool.submit({.model = "m", .prompt = Prompt{.text = "once"}}, 0, answers.next());
  EXPECT_EQ(answers.wait()[0][0].text, "and so on");
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, 0);
}

TEST(PoolLives, TakesNoLargeRequestForStuckAsSmallOnesWereQuick) {
  Made model;
  model.on_run = [](const Call& call, Outputs& outputs) {
    if (call.inputs[0].shape[0] > 1) std::this_thread::sleep_for(seconds(2));
    outputs.add(Type::Fp32, call.inputs[0].shape);
  };
  model.told.batch = 0;  // a request is taken as it is
  Bench bench(made(model, milliseconds(500)), {.name = "m", .devices = "cpu:1"});
  Answers answers;
  bench.pool.submit(row_of(1), 0, answers.next());
  answers.wait();
  bench.pool.submit(request_of({{1}, {2}}), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 2u);
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, 0);
}

TEST(PoolLives, ReplacesAWorkerThatFailsAgainAndAgainAsOthersDoNot) {
  Gate gate;
  std::atomic<int> lives = 0;  // of the first replica
  auto options = watched([&](const ReplicaSpec& spec, const std::vector<float>& rows) {
    gate.pass(rows);
    if (spec.number == 0 && lives == 1) fail(Kind::Device, "its memory is broken");
  });
  options.workers.open = [&, open = options.workers.open](const ReplicaSpec& spec) {
    lives += spec.number == 0;
    return open(spec);
  };
  Bench bench(options, {.name = "m", .path = "stand-in:", .devices = "cpu:2", .batch = 1},
              {{.name = "a"}, {.name = "b"}});
  Answers answers;
  const auto ask = [&](int i, float value) {
    bench.pool.submit(row_of(value), bench.pool.tenant(i % 2 ? "a" : "b"), answers.next());
  };
  for (int i = 0; i < 2; ++i) ask(i, kHeld);  // so that each has one
  wait_until([&] { return gate.num_held() == 2; });
  gate.open();
  EXPECT_EQ(answers.count(Status::Ok), 1u);
  for (int i = 0; i < 6; ++i) ask(i, 1), answers.wait();  // to the first replica, which is idle
  EXPECT_EQ(answers.count(Status::Internal), 7u);
  for (int i = 0; i < 3; ++i) ask(i, 1), answers.wait();  // which is doubted now
  EXPECT_EQ(answers.count(Status::Internal), 7u);
  wait_until([&] {
    const auto first = bench.pool.view().replicas[0];
    return first.restarts == 1 && first.state == "ready";
  });
  for (int i = 0; i < 8; ++i) ask(i, 1), answers.wait();
  EXPECT_EQ(answers.count(Status::Internal), 7u);
  EXPECT_EQ(bench.pool.view().replicas[1].restarts, 0);
}

TEST(PoolLives, KeepsAWorkerThatIsAskedForWhatFailsEverywhere) {
  Bench bench(watched([](const ReplicaSpec&, const std::vector<float>& rows) {
                if (rows[0] < 0) fail(Kind::Usage, "a row begins with ", rows[0]);
              }),
              {.name = "m", .path = "stand-in:", .devices = "cpu:2", .batch = 1},
              {{.name = "a"}, {.name = "b"}});
  Answers answers;
  for (int i = 0; i < 80; ++i) {
    bench.pool.submit(row_of(-1), bench.pool.tenant(i % 2 ? "a" : "b"), answers.next());
    EXPECT_EQ(answers.wait()[size_t(i)][0].outcome.text, "model 'm' failed: a row begins with -1");
  }
  bench.pool.submit(row_of(1), bench.pool.tenant("a"), answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 1u);
  for (const auto& replica : bench.pool.view().replicas) EXPECT_EQ(replica.restarts, 0);
}

TEST(PoolLives, ForgetsThatABatchWasSlowOnce) {
  std::atomic<bool> hangs = false;
  Made model;
  model.on_run = [&](const Call& call, Outputs& outputs) {
    float first = 0;
    std::memcpy(&first, call.inputs[0].data, sizeof(first));
    if (first > 1) std::this_thread::sleep_for(seconds(3));
    if (hangs.exchange(false)) std::this_thread::sleep_for(seconds(4));
    outputs.add(Type::Fp32, call.inputs[0].shape);
  };
  model.told.batch = 1;
  Bench bench(made(model, seconds(1)), {.name = "m", .devices = "cpu:1"});
  const auto ask = [&](float value, int count = 1) {
    Answers answers;
    for (int i = 0; i < count; ++i) bench.pool.submit(row_of(value), 0, answers.next());
    EXPECT_EQ(answers.count(Status::Ok), size_t(count));
  };
  ask(2);
  for (int i = 0; i < 80; ++i) ask(1, 64);
  const int before = bench.pool.view().replicas[0].restarts;  // the machine may have stalled
  hangs = true;
  ask(1);
  EXPECT_EQ(bench.pool.view().replicas[0].restarts, before + 1) << "four times 3 s are 12";
}

TEST(PoolLives, GoesOnThoughWhoAskedThrowsAtItsAnswer) {
  std::atomic<int> lines = 0;
  Bench bench(Bench::options(), {.name = "m", .path = "stand-in:", .devices = "cpu:1"}, {},
              {.sink = [&](std::string_view line) {
                lines += line.find("did not take the answer: no memory") != line.npos;
              }});
  Answers answers;
  bench.pool.submit(row_of(1, {.stream = "s"}), 0,
                    [](const Answer&) { throw std::runtime_error("no memory"); });
  for (int i = 0; i < 2; ++i) bench.pool.submit(row_of(1, {.stream = "s"}), 0, answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 2u);
  EXPECT_EQ(lines, 1);
  EXPECT_TRUE(bench.pool.drain(soon())) << "all have been answered";
}

TEST(PoolLivesMultiproc, TellsTheTruthInItsGauges) {
  Bench bench("stand-in:value_ms=1", "cpu:1", 1, true);
  const auto gauge = [&](const std::string& name) {
    bench.pool.view();
    std::ostringstream text;
    bench.metrics.write_prometheus(text);
    const std::string all = text.str();
    std::smatch found;
    const bool there =
        std::regex_search(all, found, std::regex("\n" + name + R"(\{[^}]*\} (\S+)\n)"));
    return there ? std::stod(found[1]) : -1;
  };
  EXPECT_EQ(gauge("yoke_replica_ready"), 1);
  for (int i = 1; i <= 2; ++i) {  // after the second quick death it waits before it starts
    ::kill(bench.pool.view().replicas[0].pid, SIGKILL);
    wait_until([&] { return gauge("yoke_replica_restarts") == i; });
    if (i == 2) {
      EXPECT_EQ(gauge("yoke_replica_ready"), 0);
    }
    wait_until([&] { return gauge("yoke_replica_ready") == 1; });
  }
  EXPECT_EQ(gauge("yoke_replica_restarts"), 2);
  Answers answers;
  for (int i = 0; i < 8; ++i)
    bench.pool.submit(row_of(i == 0 ? 1000 : 0), 0, answers.next());  // the first takes a second
  EXPECT_EQ(gauge("nv_inference_pending_request_count"), 6) << "one computes, one is staged";
  bench.pool.unload("m");
  EXPECT_GT(gauge("nv_inference_pending_request_count"), 0);
  EXPECT_EQ(answers.count(Status::Ok), 8u);
  wait_until([&] { return bench.pool.view().replicas.empty(); });
  EXPECT_EQ(gauge("nv_inference_pending_request_count"), 0);
  EXPECT_EQ(gauge("yoke_replica_ready"), -1);
}

TEST(PoolLives, SaysOfAPromptThatItCannotBeTaken) {
  Made model;
  model.told.has_words = true;
  model.on_prompt = [] { fail(Kind::Usage, "the prompt is too long"); };
  Bench bench(made(model), {.name = "m", .devices = "cpu:1"});
  Answers answers;
  for (int i = 0; i < 40; ++i) {
    bench.pool.submit({.model = "m", .prompt = Prompt{.text = "once"}}, 0, answers.next());
    const auto& outcome = answers.wait()[size_t(i)][0].outcome;
    EXPECT_EQ(outcome.status, Status::Invalid);
    EXPECT_EQ(outcome.text, "model 'm': the prompt is too long");
  }
}

}  // namespace
}  // namespace yoke::serve
