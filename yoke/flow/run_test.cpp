// SPDX-License-Identifier: Apache-2.0
// How a run goes on, ends and is ended; and what copies, rings, regions and phases compute.
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <filesystem>
#include <latch>
#include <set>
#include <thread>

#include "yoke/base/rng.h"
#include "yoke/comm/world.h"
#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

using namespace std::chrono_literals;

Graph counting(const std::string& devices = "cpu:2") {
  auto graph = graph_on(devices);
  graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("more", plus(1), {.device = int(graph.options().devices.size()) - 1});
  graph.edge("data", "more");
  graph.output("y", "more");
  return graph;
}

TEST(Run, HaltEndsAfterARoundThatAllHaveMade) {
  Executor executor(compile(counting()));
  std::jthread other([&](const std::stop_token& over) {
    while (!over.stop_requested()) {
      std::this_thread::sleep_for(1ms);
      if (executor.rounds() > 0) executor.halt();
    }
  });
  const int64_t made = executor.run(int64_t(1) << 40);
  other.request_stop();
  other.join();
  EXPECT_GT(made, 0);
  EXPECT_EQ(number(executor.last()[0]), double(made + 1));
  EXPECT_EQ(executor.report().rounds, made);
  EXPECT_EQ(executor.run(3), 3);  // and goes on from there
  EXPECT_EQ(number(executor.last()[0]), double(made + 4));
}

TEST(Run, AStopThatComesFirstIsNotLost) {
  Executor executor(compile(counting()));
  executor.stop("not today");
  EXPECT_TRUE(has(error_of([&] { executor.run(1); }), "not today"));
  executor.run(1);
}

// Nobody waits for anybody: each queue has to look by itself.
TEST(Run, AStopEndsAQueueThatNeverWaits) {
  auto graph = graph_on("cpu");
  Executor* running = nullptr;
  int made = 0;
  graph.node("data", function(Function([&](const Tensors&, int64_t) -> Tensors {
               if (++made == 3) running->stop("enough");
               return {at::ones({1})};
             })),
             {.outputs = {"y"}});
  Executor executor(compile(graph));
  running = &executor;
  EXPECT_TRUE(has(error_of([&] { executor.run(1000); }), "enough"));
  EXPECT_EQ(made, 3);
  EXPECT_EQ(executor.run(5), 5);
}

TEST(Run, AFailureEndsAQueueThatIsConnectedToNothing) {
  auto graph = graph_on("cpu:2");
  std::atomic<int64_t> made = 0;
  graph.node("throws", function(Function([&](const Tensors&, int64_t) -> Tensors {
               while (made < 3) std::this_thread::yield();
               fail(Kind::Usage, "out of paper");
             })),
             {.device = 0, .outputs = {"y"}});
  graph.node("goes_on", function(Function([&](const Tensors&, int64_t) -> Tensors {
               ++made;
               std::this_thread::sleep_for(100us);
               return {at::ones({1})};
             })),
             {.device = 1, .outputs = {"y"}});
  Executor executor(compile(graph));
  EXPECT_TRUE(has(error_of([&] { executor.run(100'000); }), "out of paper"));
  EXPECT_LT(made, 100'000);
}

TEST(Run, ANodeThatDoesNotComeBackIsNamed) {
  static std::latch never(1);  // outlives the thread that is left behind
  for (const char* devices : {"cpu", "cpu:2"}) {
    auto graph = graph_on(devices);
    graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
    graph.node("hang", function([](const Tensors& in) {
                 never.wait();
                 return in[0];
               }),
               {.device = int(graph.options().devices.size()) - 1});
    graph.edge("data", "hang");
    graph.output("y", "hang");
    Executor executor(compile(graph), {.timeout = 300ms});
    const auto text = error_of([&] { executor.run(1000); });
    EXPECT_TRUE(has(text, "has been in 'hang' of round 0")) << text;
    EXPECT_TRUE(has(error_of([&] { executor.run(1); }), "has not come back"));
  }
}

// Waits that in all are longer than the timeout, for queues that move, or wait for one that does.
TEST(Run, WhoWaitsForWhatMovesIsPatient) {
  for (const auto& [transport, phase] :
       {std::pair{Transport::Auto, 0}, {Transport::Send, 0}, {Transport::Auto, 1}}) {
    auto graph = graph_on("cpu:3");
    graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
    std::vector<std::string> slow{"data"};
    for (int i = 0; i < 8; ++i) {
      slow.push_back(cat("nap", i));
      add(graph, slow.back(), "sleep:ms=200", {.device = 0});
    }
    graph.chain(slow);
    graph.node("after", plus(1), {.device = 1, .phase = phase});
    graph.node("last", plus(1), {.device = 2, .phase = phase});
    graph.edge(slow.back(), "after", {.transport = transport});
    graph.edge("after", "last", {.transport = transport});
    graph.output("y", "last");
    Executor executor(compile(graph), {.timeout = 1s});
    executor.run(1);
    EXPECT_EQ(number(executor.last()[0]), 3);
  }
}

// They meet in every turn, so that often all of them wait at the moment of a look.
TEST(Run, WhoWaitsForQueuesThatMeetIsPatient) {
  auto graph = graph_on("cpu:3");
  graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("a", plus(1), {.device = 0});
  const Time enough = SteadyClock().now() + 5s;
  graph.node("b", function(Function([enough](const Tensors& in, int64_t) -> Tensors {
               return {in[0], at::full({1}, double(SteadyClock().now() > enough))};
             })),
             {.device = 1, .inputs = {"x"}, .outputs = {"y", "done"}});
  graph.node("after", plus(1), {.device = 2});
  graph.chain({"data", "a", "b", "after"});
  graph.loop("again", {.nodes = {"a", "b"},
                       .carry = {{"b.y", "a.x"}},
                       .until = "b.done",
                       .most = int64_t(1) << 30});
  Executor executor(compile(graph), {.timeout = 1s});
  executor.run(1);
  EXPECT_GT(SteadyClock().now(), enough);
}

TEST(Run, WhoWaitsForWhatHangsIsNotWhateverElseMoves) {
  auto graph = graph_on("cpu:4");
  std::atomic<bool> hangs{true};
  graph.node("hang", function(Function([&](const Tensors&, int64_t) -> Tensors {
               for (int i = 0; i < 100 && hangs; ++i) std::this_thread::sleep_for(10ms);
               return {at::ones({1})};
             })),
             {.device = 0, .outputs = {"y"}});
  graph.node("between", plus(1), {.device = 1});
  graph.node("waits", plus(1), {.device = 2});
  graph.chain({"hang", "between", "waits"});
  graph.node("alone", counts(), {.device = 3, .outputs = {"y"}});
  add(graph, "naps", "sleep:ms=20", {.device = 3});
  graph.edge("alone", "naps");
  Executor executor(compile(graph), {.timeout = 200ms});
  const auto text = error_of([&] { executor.run(50); });
  hangs = false;
  EXPECT_TRUE(has(text, "waited 0.2 s (flow.timeout_s) for a value of '")) << text;
  EXPECT_TRUE(has(text, "rank 0: hang #0")) << text;
}

TEST(Run, RoundsThatNobodyCollectsAreBounded) {
  auto graph = graph_on("cpu");
  graph.input("x", {});
  graph.node("more", plus(1));
  graph.edge("x", "more");
  graph.output("y", "more");
  Executor executor(compile(graph));
  for (int i = 0; i < 64; ++i) executor.submit({at::full({1}, i)});
  EXPECT_TRUE(has(error_of([&] { executor.submit({at::zeros({1})}); }), "collect() first"));
  for (int i = 0; i < 64; ++i) EXPECT_EQ(number(executor.collect()[0]), i + 1);
  EXPECT_EQ(number(executor.step({at::zeros({1})})[0]), 1);
}

TEST(Run, AFailureThatNobodyCollectedIsToldByTheNextSubmit) {
  auto graph = graph_on("cpu");
  graph.input("x", {});
  graph.node("picky", function([](const Tensors& in) {
               if (number(in[0]) < 0) fail(Kind::Usage, "less than nothing");
               return in[0] + 1;
             }));
  graph.edge("x", "picky");
  graph.output("y", "picky");
  std::latch began(1);
  std::weak_ptr<comm::World> world;
  Executor executor(compile(graph), {.on_world = [&](auto made) {
                      if (world.lock()) return;
                      world = made;
                      if (!began.try_wait()) began.count_down();
                    }});
  executor.submit({at::zeros({1})});
  executor.submit({at::full({1}, -1)});
  began.wait();
  while (!world.expired()) std::this_thread::yield();
  std::string error = "no error";  // some may come just before the end is told
  while (error == "no error" || has(error, "collect() first"))
    error = error_of([&] { executor.submit({at::full({1}, 5)}); });
  EXPECT_TRUE(has(error, "less than nothing")) << error;
  EXPECT_TRUE(has(error_of([&] { executor.collect(); }), "collect() without a submit()"));
  EXPECT_EQ(number(executor.step({at::full({1}, 7)})[0]), 8);
}

// A node beside the way of the outputs fails after they are there.
TEST(Run, WaitTellsOfNodesThatNoOutputNeeds) {
  auto graph = graph_on("cpu:2");
  std::atomic<bool> go = false;
  graph.input("x", {});
  graph.node("aside", function([&](const Tensors& in) -> at::Tensor {
               while (!go) std::this_thread::yield();
               fail(Kind::Usage, "out of paper");
               return in[0];
             }),
             {.device = 1});
  graph.edge("x", "aside");
  graph.node("more", plus(1), {.device = 0});
  graph.edge("x", "more");
  graph.output("y", "more");
  Executor executor(compile(graph));
  executor.step({at::zeros({1})});
  EXPECT_FALSE(executor.done());
  go = true;
  EXPECT_TRUE(has(error_of([&] { executor.wait(); }), "out of paper"));
}

// ---- what is under way when an executor goes ----

TEST(Run, AnExecutorThatGoesLeavesANodeBehindThatHangs) {
  static std::latch never(1), hangs(1);  // outlive the thread that is left behind
  auto graph = graph_on("cpu:2");
  graph.input("x", {});
  graph.node("hang", function([](const Tensors& in) {
               if (!hangs.try_wait()) hangs.count_down();
               never.wait();
               return in[0];
             }),
             {.device = 1});
  graph.edge("x", "hang");
  graph.output("y", "hang");
  const Time began = SteadyClock().now();
  {
    Executor executor(compile(graph), {.timeout = 200ms});
    for (int i = 0; i < 3; ++i) executor.submit({at::zeros({1})});
    hangs.wait();
  }
  EXPECT_LT(SteadyClock().now() - began, 20s);
}

TEST(Run, AnExecutorThatGoesBeginsNothingMore) {
  auto graph = graph_on("cpu");
  graph.input("x", {});
  std::shared_ptr<comm::World> world;
  std::latch began(1);
  std::atomic<int> fired = 0;
  graph.node("slow", function([&](const Tensors& in) {
               if (++fired == 1) began.count_down();
               const Time patience = SteadyClock().now() + 2s;
               while (fired == 1 && !world->failed() && SteadyClock().now() < patience)
                 std::this_thread::yield();
               return in[0];
             }));
  graph.edge("x", "slow");
  graph.output("y", "slow");
  {
    Executor executor(compile(graph), {.on_world = [&](auto made) { world = made; }});
    for (int i = 0; i < 64; ++i) executor.submit({at::zeros({1})});
    began.wait();
  }
  EXPECT_EQ(fired, 1);
}

TEST(Run, WhatWasSubmittedAndNotCollectedIsForgottenByRun) {
  Executor executor(compile(counting()));
  executor.submit({});
  executor.wait();
  EXPECT_EQ(executor.run(2), 2);
  EXPECT_EQ(number(executor.last()[0]), 4);
  executor.submit({});
  EXPECT_EQ(number(executor.collect()[0]), 5);
  EXPECT_EQ(executor.report().rounds, 4);
}

// ---- who may write into a value ----

Open adds_in_place() {
  return function([](const Tensors& in) { return in[0].add_(1); });
}

TEST(Run, WhatIsWrittenIntoIsNobodyElses) {
  // The caller's own.
  auto graph = graph_on("cpu");
  graph.input("x", {});
  graph.node("write", adds_in_place(), {.in_place = true});
  graph.edge("x", "write");
  graph.output("y", "write");
  const auto given = at::zeros({2});
  EXPECT_EQ(number(Executor(compile(graph)).step({given})[0]), 1);
  EXPECT_EQ(number(given), 0);

  // What its giver keeps, behind one that gives on what it gets; and what serves again.
  for (const int64_t every : {1, 4}) {
    graph = graph_on("cpu");
    const auto kept = at::zeros({2});
    graph.node("data",
               function(Function([kept](const Tensors&, int64_t) { return Tensors{kept}; })),
               {.outputs = {"y"}});
    add(graph, "same", "same");
    graph.node("write", adds_in_place(), {.in_place = true});
    graph.edge("data", "same");
    graph.edge("same", "write", {.every = every});
    graph.output("y", "write");
    EXPECT_EQ(outputs_of(graph, 5), std::vector<double>(5, 1.0)) << "every " << every;
    EXPECT_EQ(number(kept), 0);
  }
}

// What is proved knows only of those who say that they write.
TEST(Run, WhoWritesWithoutSayingSoIsToldHowToSayIt) {
  const auto flow = [](const std::string& into, NodeOptions options) {
    auto graph = graph_on("cpu");
    graph.input("value", {}), graph.input("other", {});
    options.inputs = {"x", "m"};
    graph.node("write", function([into](const Tensors& in) { return in[into == "m"].sub_(1); }),
               options);
    graph.edge("value", "write.x"), graph.edge("other", "write.m");
    graph.output("y", "write");
    return graph;
  };
  for (const std::string into : {"x", "m"}) {
    Executor executor(compile(flow(into, {})));
    const auto text = error_of([&] { executor.step({at::zeros({2}), at::zeros({3})}); });
    EXPECT_TRUE(has(text, cat("node 'write' failed in round 0: its input '", into,
                              "' was written into while it computed")) &&
                has(text, "in_place = true") && has(text, "it was given x FP32[2], m FP32[3]"))
        << text;
  }
  Executor says_so(compile(flow("x", {.in_place = true})));
  EXPECT_EQ(number(says_so.step({at::zeros({2}), at::zeros({3})})[0]), -1);
  Executor says_less(compile(flow("m", {.in_place = true})));
  EXPECT_TRUE(has(error_of([&] {
                    says_less.step({at::zeros({2}), at::zeros({3})});
                  }),
                  "in_place = true is for the first input"));
}

TEST(Run, ATensorOfInferenceModeIsTaken) {  // LibTorch does not count who writes into it
  auto graph = graph_on("cpu");
  graph.input("x", {});
  graph.node("more", plus(1));
  graph.edge("x", "more");
  graph.output("y", "more");
  at::Tensor given;
  {
    const c10::InferenceMode inference;
    given = at::zeros({2});
  }
  EXPECT_EQ(number(Executor(compile(graph)).step({given})[0]), 1);
}

TEST(Run, TheFirstValuesOfAnEdgeAreOneTensorUntilSomebodyWrites) {
  if (kGpu) GTEST_SKIP() << "on a GPU each value is brought there by itself";
  const auto delayed = [](Open open, NodeOptions options) {
    auto graph = graph_on("cpu");
    graph.node("data", counts(), {.outputs = {"y"}});
    graph.node("late", open, options);
    graph.edge("data", "late", {.staleness = 3, .initial = 7, .initial_shape = {1}});
    graph.output("y", "late");
    return graph;
  };
  std::set<const void*> seen;
  const auto looks = function([&](const Tensors& in) {
    if (number(in[0]) == 7) seen.insert(in[0].const_data_ptr());
    return in[0] + 0;
  });
  EXPECT_EQ(outputs_of(delayed(looks, {}), 4), (std::vector<double>{7, 7, 7, 1}));
  EXPECT_EQ(seen.size(), 1u);
  EXPECT_EQ(outputs_of(delayed(adds_in_place(), {.in_place = true}), 4),
            (std::vector<double>{8, 8, 8, 2}));
}

TEST(Run, AFirstValueThatIsTooLargeIsNamed) {
  auto graph = graph_on("cpu");
  graph.node("data", counts(), {.outputs = {"y"}});
  graph.node("late", plus(1));
  graph.edge("data", "late", {.staleness = 1, .initial_shape = {int64_t(1) << 50}});
  const auto text = error_of([&] { Executor(compile(graph)).run(1); });
  EXPECT_TRUE(has(text, "edge 'data.y -> late.x'")) << text;
}

// ---- errors name node, round and shapes ----

TEST(Run, WhatDecidesAndIsNotOneNumberIsNamed) {
  auto graph = graph_on("cpu:2");
  graph.input("x", {});
  graph.node("gate", plus(0), {.device = 0});
  for (const int at : {0, 1}) graph.node(cat("n", at), plus(at), {.device = at});
  graph.edge("x", "gate"), graph.edge("x", "n0"), graph.edge("x", "n1");
  graph.branch("pick", {.when = "gate",
                        .then = {"n0"},
                        .otherwise = {"n1"},
                        .then_gives = "n0",
                        .otherwise_gives = "n1"});
  graph.output("y", "pick");
  Executor branch(compile(graph));
  branch.step({at::ones({1})});
  auto text = error_of([&] { branch.step({at::ones({2})}); });
  EXPECT_TRUE(has(text,
                  "node 'gate' in round 1: output 'y', by which 'pick' decides, must be one "
                  "number, got FP32[2]"))
      << text;

  graph = graph_on("cpu");
  graph.input("x", {});
  add(graph, "more", "scale:by=2");
  graph.edge("x", "more");
  graph.loop("again", {.nodes = {"more"}, .carry = {{"more", "more"}}, .until = "more", .most = 3});
  graph.output("y", "more");
  text = error_of([&] { Executor(compile(graph)).step({at::ones({2, 3})}); });
  EXPECT_TRUE(has(text,
                  "node 'more' in round 0: output 'y', by which 'again' decides, must be one "
                  "number, got FP32[2,3]"))
      << text;
}

// Values of other widths, one after the other.
Open widths(std::vector<int64_t> wide) {
  return function(Function([wide](const Tensors&, int64_t firing) -> Tensors {
    return {at::zeros({1, wide[size_t(firing) % wide.size()]})};
  }));
}

TEST(Run, RowsThatCannotBeJoinedAreNamed) {
  auto graph = graph_on("cpu");
  graph.node("data", widths({2, 2, 2, 3}), {.outputs = {"y"}});
  graph.node("pair", plus(0), {.inputs = {"2*x"}});
  graph.edge("data", "pair");
  const auto text = error_of([&] { Executor(compile(graph)).run(3); });
  EXPECT_TRUE(has(text, "node 'pair' failed in round 1, where values of input 'x' are joined: ") &&
              has(text, "it was given x FP32[1,2] FP32[1,3]"))
      << text;
}

TEST(Run, EachValueOfAFiringIsWhatItsPortSays) {
  auto graph = graph_on("cpu");
  graph.node("data", widths({2, 2, 2, 3}), {.outputs = {"y"}});
  graph.node("pair", plus(0), {.inputs = {"2*x:FP32[n,2]"}});
  graph.edge("data", "pair");
  auto text = error_of([&] { Executor(compile(graph)).run(3); });
  EXPECT_TRUE(has(text, "node 'pair' in round 1: input 'x' wants ") &&
              has(text, "got FP32[1,3]; all of them: x FP32[1,2] FP32[1,3]"))
      << text;

  graph = graph_on("cpu");
  graph.node("data", widths({2}), {.outputs = {"y"}});
  graph.node("double", function([](const Tensors& in) {
               return in[0].repeat({4, 1});
             }),
             {.inputs = {"x"}, .outputs = {"2*y:FP32[1,2]"}});
  graph.node("take", plus(0));
  graph.edge("data", "double"), graph.edge("double", "take");
  text = error_of([&] { Executor(compile(graph)).run(1); });
  EXPECT_TRUE(has(text, "node 'double' in round 0: output 'y' wants FP32[1,2], got FP32[2,2]"))
      << text;
}

TEST(Run, AMessageThatCannotBeSentNamesItsEdge) {
  auto graph = graph_on("cpu:2");
  graph.node("data", function(Function([](const Tensors&, int64_t) {
               return Tensors{at::zeros(std::vector<int64_t>(11, 1))};
             })),
             {.device = 0, .outputs = {"y"}});
  graph.node("take", plus(0), {.device = 1});
  graph.edge("data", "take", {.transport = Transport::Send});
  const auto text = error_of([&] { Executor(compile(graph)).run(1); });
  EXPECT_TRUE(has(text,
                  "edge 'data.y -> take.x' failed in round 0: a value that is sent has 10 "
                  "sizes at most, got 11") &&
              has(text, "it sent FP32[1,1,1,1,1,1,1,1,1,1,1]"))
      << text;
}

// ---- copies ----

TEST(Run, CopiesOfAModuleBeginEqual) {
  auto graph = graph_on("cpu:2");
  graph.input("x", {});
  graph.node("net", module([] { return torch::nn::Linear(4, 3); }), {.replicas = {0, 1}});
  graph.edge("x", "net");
  graph.output("y", "net");
  Executor executor(compile(graph));
  const auto row = at::ones({1, 4});
  const auto got = executor.step({at::cat({row, row})})[0];
  EXPECT_TRUE(at::equal(got[0], got[1])) << got;
}

// A step that one copy has taken and the other has not is taken back by the next run.
TEST(Run, CopiesAreEqualAgainAfterAFailure) {
  std::atomic<int> steps = -1;
  auto graph = graph_on("cpu:2");
  add(graph, "data", "spirals:batch=32");
  add(graph, "net", "mlp:2,3", {.replicas = {0, 1}, .role = Role::Train});
  add(graph, "loss", "cross_entropy");
  graph.edge("data.x", "net"), graph.edge("net", "loss"), graph.edge("data.label", "loss.label");
  Executor executor(compile(graph), {.before = [&](int, const plan::Operation& operation) {
                      if (!operation.name.ends_with(" step") || steps < 0) return;
                      if (++steps == 2) fail(Kind::Usage, "out of steps");
                    }});
  executor.run(2);
  const auto equal = [&] {
    return at::equal(executor.weights("net")[0].cpu(), executor.weights("net@1")[0].cpu());
  };
  EXPECT_TRUE(equal());
  steps = 0;
  EXPECT_TRUE(has(error_of([&] { executor.run(1); }), "out of steps"));
  EXPECT_FALSE(equal());
  steps = -1;
  executor.run(1);
  EXPECT_TRUE(equal());
}

Open normed() {
  return module([] {
    return torch::nn::Sequential(torch::nn::Linear(2, 4), torch::nn::BatchNorm1d(4),
                                 torch::nn::Linear(4, 3));
  });
}

bool equal(const Tensors& a, const Tensors& b) {
  return std::ranges::equal(
      a, b, [](const auto& one, const auto& other) { return at::equal(one.cpu(), other.cpu()); });
}

// A batch norm's running means are no weights, and a model without them is another one.
TEST(Run, WhatAModelKeepsBesideItsWeightsGoesWithThem) {
  const auto trained = [](Graph& graph, NodeOptions options) {
    options.role = Role::Train;
    add(graph, "data", "spirals:batch=32", {.device = 0});
    graph.node("net", normed(), options);
    add(graph, "loss", "cross_entropy", {.device = 0});
    graph.edge("data.x", "net"), graph.edge("net", "loss"), graph.edge("data.label", "loss.label");
  };
  auto graph = graph_on("cpu:2");
  trained(graph, {.device = 0});
  graph.node("actor", normed(), {.device = 1});
  graph.edge("data.x", "actor");
  graph.broadcast_weights("net", {"actor"});
  Executor executor(compile(graph));
  executor.run(5);
  const auto &net = executor.body("net"), &actor = executor.body("actor");
  EXPECT_GT(net.buffers[0].abs().sum().item<double>(), 0);
  for (const size_t i : {0, 1})
    EXPECT_TRUE(at::equal(net.buffers[i].cpu(), actor.buffers[i].cpu())) << i;

  const auto path =
      std::filesystem::temp_directory_path() / cat("yoke-kept-", ::getpid(), ".safetensors");
  save_weights(net, path.string());
  const auto begun = with_weights(normed(), path.string())(at::kCPU);
  EXPECT_TRUE(equal(begun.state(), net.state()));
  std::filesystem::remove(path);
  const auto copy = normed()(at::kCPU);
  copy_weights(begun, copy);
  EXPECT_TRUE(equal(copy.state(), net.state()));

  graph = graph_on("cpu:2");
  trained(graph, {.replicas = {0, 1}});
  Executor copies(compile(graph));
  copies.run(3);
  EXPECT_GT(copies.body("net").buffers[0].abs().sum().item<double>(), 0);
  EXPECT_TRUE(equal(copies.body("net").state(), copies.body("net@1").state()));
}

TEST(Run, RowsAreCountedEquallyByLossesOfCopies) {
  const auto flow = [](int64_t batch) {
    auto graph = graph_on("cpu:2");
    add(graph, "data", cat("spirals:batch=", batch));
    add(graph, "net", "mlp:2,3", {.role = Role::Train});
    add(graph, "loss", "cross_entropy");
    graph.edge("data.x", "net"), graph.edge("net", "loss"), graph.edge("data.label", "loss.label");
    graph.data_parallel("both", {.nodes = {"net", "loss"}, .devices = {{0, 0}, {1, 1}}});
    return graph;
  };
  Executor(compile(flow(32))).run(1);
  EXPECT_TRUE(has(error_of([&] { Executor(compile(flow(33))).run(1); }),
                  "cannot cut 33 rows evenly over 2 copies"));
}

// ---- what is delayed ----

TEST(Run, AnEnsembleDelaysOnceAndAChainAtEveryEdge) {
  const EdgeOptions late{.staleness = 1, .initial = -1, .initial_shape = {1}};
  auto graph = graph_on("cpu:2");
  graph.node("data", counts(), {.outputs = {"y"}});
  for (const int at : {0, 1}) graph.node(cat("n", at), plus(10 * at), {.device = at});
  graph.ensemble("both", "data", {.nodes = {"n0", "n1"}, .merge = "mean", .edge = late});
  graph.output("y", "both");
  EXPECT_EQ(outputs_of(graph, 3), (std::vector<double>{-1, 6, 7}));

  graph = graph_on("cpu:2");
  graph.node("data", counts(), {.outputs = {"y"}});
  for (const int at : {0, 1}) graph.node(cat("n", at), plus(10), {.device = at});
  graph.chain({"data", "n0", "n1"}, late);
  graph.output("y", "n1");
  EXPECT_EQ(outputs_of(graph, 4), (std::vector<double>{9, 19, 21, 22}));
}

// ---- what is traded ----

TEST(Run, ARingOfOutputsCarriesNoGradients) {
  const auto trained = [](bool ring) {
    auto graph = graph_on("cpu:2");
    add(graph, "data", "spirals:batch=32");
    for (const int at : {0, 1}) {
      add(graph, cat("net", at), "mlp:2,3", {.device = at, .role = Role::Train});
      add(graph, cat("loss", at), "mutual", {.device = at});
      graph.edge("data.x", cat("net", at)), graph.edge("data.label", cat("loss", at, ".label"));
      graph.edge(cat("net", at), cat("loss", at, ".x"));
    }
    for (const int at : {0, 1})  // of one other: stacked by itself
      graph.node(cat("only", at), function([](const Tensors& in) { return in[0].unsqueeze(0); }),
                 {.device = at});
    if (ring) {
      graph.exchange("trade", {.from = {"net0", "net1"}, .into = {"only0", "only1"}, .ring = true});
      for (const int at : {0, 1}) graph.edge(cat("only", at), cat("loss", at, ".peers"));
    } else {
      graph.exchange("trade", {.from = {"net0", "net1"}, .into = {"loss0.peers", "loss1.peers"}});
      for (const int at : {0, 1}) graph.edge("data.x", cat("only", at));
    }
    Executor executor(compile(graph));
    executor.run(5);
    return executor.losses("loss0").back();
  };
  EXPECT_NEAR(trained(true), trained(false), kClose);  // two in a ring: each to the other
}

TEST(Run, ARingOfWeightsIsTheMeanWithTheOneBefore) {
  for (const char* devices : {"cpu", "cpu:2", "cpu:3"})
    for (const bool sum : {false, true}) {
      auto graph = graph_on(devices);
      const int queues = int(graph.options().devices.size());
      add(graph, "data", "spirals:batch=8");
      std::vector<std::string> names;
      std::vector<at::Tensor> first;
      for (int i = 0; i < 3; ++i) {
        names.push_back(cat("net", i));
        add(graph, names.back(), "mlp:2,3", {.device = i % queues});
        graph.edge("data.x", names.back());
        first.push_back(word("mlp:2,3", names.back())(at::kCPU).weights[0].detach());
      }
      graph.exchange({.name = "ring", .ring = true, .sum = sum}, names);
      Executor executor(compile(graph));
      executor.run(1);
      for (size_t i = 0; i < 3; ++i) {
        const auto both = first[i] + first[(i + 2) % 3];
        EXPECT_TRUE(at::allclose(executor.weights(names[i])[0].cpu(), sum ? both : both / 2))
            << devices << ", " << names[i];
      }
      const auto report = executor.report();
      EXPECT_EQ(report.edges.back().name, "ring");
      EXPECT_EQ(report.edges.back().values, 1);
      EXPECT_EQ(report.edges.back().bytes, 3 * 4u * 9);
    }
}

// ---- one model in several places ----

TEST(Run, WhoSharesWeightsComputesInItsOwnMode) {
  auto graph = graph_on("cpu");
  add(graph, "data", "spirals:batch=64");
  const auto net = module(
      [] { return torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::Dropout(0.9)); });
  graph.node("net", net, {.role = Role::Train, .optimizer = {.lr = 0}});
  add(graph, "loss", "cross_entropy");
  graph.edge("data.x", "net"), graph.edge("net", "loss"), graph.edge("data.label", "loss.label");
  graph.node("exam", net, {.weights_of = "net"});
  graph.node("zeros", function([](const Tensors& in) { return (in[0] == 0).sum(); }));
  graph.edge("data.x", "exam"), graph.edge("exam", "zeros");
  graph.output("y", "zeros");
  EXPECT_EQ(outputs_of(graph, 3), std::vector<double>(3, 0.0));
}

// Class numbers that come from a trained model by way of one that has no gradient.
TEST(Run, WholeNumbersStopGradients) {
  auto graph = graph_on("cpu");
  add(graph, "data", "spirals:batch=32");
  add(graph, "net", "mlp:2,3", {.role = Role::Train});
  add(graph, "guess", "argmax");
  add(graph, "loss", "cross_entropy");
  graph.edge("data.x", "net"), graph.edge("net", "loss.x");
  graph.edge("net", "guess"), graph.edge("guess", "loss.label");
  Executor executor(compile(graph));
  executor.run(20);
  EXPECT_LT(executor.losses("loss").back(), executor.losses("loss").front());
}

// ---- phases and regions ----

TEST(Run, AnOutputOfALaterPhaseIsOfThatPhase) {
  auto graph = graph_on("cpu:2");
  graph.node("data", counts(), {.outputs = {"y"}});
  graph.node("early", plus(1), {.device = 0});
  graph.node("late", plus(2), {.device = 1, .phase = 1});
  graph.edge("data", "early"), graph.edge("data", "late");
  graph.ensemble("both", "", {.nodes = {"early", "late"}, .merge = "mean"});
  graph.output("y", "both");
  EXPECT_EQ(outputs_of(graph, 2), (std::vector<double>{2.5, 3.5}));
}

// A value of every second round is there for an arm that was not taken when it came.
TEST(Run, AnArmFindsTheLastValueOfAnEdge) {
  auto graph = graph_on("cpu");
  graph.node("data", counts(), {.outputs = {"y"}});
  graph.node("odd", function([](const Tensors& in) { return in[0].remainder(2); }));
  for (const char* name : {"a", "b"}) graph.node(name, plus(name[0] == 'a' ? 100 : 200));
  graph.edge("data", "odd");
  graph.edge("data", "a", {.every = 2}), graph.edge("data", "b", {.every = 2});
  graph.branch("pick", {.when = "odd",
                        .then = {"a"},
                        .otherwise = {"b"},
                        .then_gives = "a",
                        .otherwise_gives = "b"});
  graph.output("y", "pick");
  EXPECT_EQ(outputs_of(graph, 4), (std::vector<double>{101, 201, 103, 203}));
}

}  // namespace
}  // namespace yoke::flow
