// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/flow_test.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

namespace yoke::flow {
namespace {

using namespace std::chrono_literals;

// Counts who comes by; whoever waits for too many gives up, so that a test fails and does not hang.
class Gate {
 public:
  void come() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  bool await(int count, std::chrono::milliseconds most = 60s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, most, [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

// ---- values ----

TEST(Flow, AnEnsembleMerges) {
  const auto merged = [](const std::string& how, std::vector<double> weights = {}) {
    auto graph = graph_on("cpu:3");
    graph.input("x:FP32[n]", {});
    for (const auto& [name, by] : {std::pair{"a", 0.0}, {"b", 0.0}, {"c", 3.0}})
      graph.node(name, plus(by), {.device = name[0] - 'a'});
    graph.ensemble("all", "x", {.nodes = {"a", "b", "c"}, .merge = how, .weights = weights});
    graph.output("y", "all");
    Executor executor(compile(graph));
    return executor.step({at::ones({2})})[0].cpu();
  };
  EXPECT_TRUE(merged("mean").equal(at::full({2}, 2.0)));
  EXPECT_TRUE(merged("vote").equal(at::ones({2}, at::kLong)));
  EXPECT_TRUE(merged("weighted", {1, 2, 0.5}).equal(at::full({2}, 5.0)));
  EXPECT_EQ(merged("stack").sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_TRUE(has(error_of([&] { merged("median"); }),
                  "neither one of concat, mean, stack, vote, weighted nor a node"));
  EXPECT_TRUE(
      has(error_of([&] { merged("weighted", {1}); }), "a weight for each of its 3 nodes, got 1"));
}

TEST(Flow, AnEnsembleIsMergedByANodeOfOnesOwn) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("a", plus(1), {.device = 0});
  graph.node("b", plus(5), {.device = 1});
  graph.node("largest", function([](const Tensors& in) { return at::maximum(in[0], in[1]); }),
             {.device = 1, .inputs = {"x0", "x1"}});
  graph.ensemble("all", "x", {.nodes = {"a", "b"}, .merge = "largest"});
  graph.output("y", "all.y");
  Executor executor(compile(graph));
  EXPECT_EQ(number(executor.step({at::zeros({1})})[0]), 5);
}

TEST(Flow, StalenessIsExact) {
  auto graph = graph_on("cpu:2");
  graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("late", plus(0), {.device = 1});
  graph.edge("count", "late", {.staleness = 2, .initial = -7, .initial_shape = {1}});
  graph.output("y", "late");
  EXPECT_EQ(outputs_of(graph, 5), (std::vector<double>{-7, -7, 1, 2, 3}));
}

TEST(Flow, EveryNthValueServesAgainInBetween) {
  auto graph = graph_on("cpu:2");
  graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("late", plus(0), {.device = 1});
  graph.edge("count", "late", {.every = 3});
  graph.output("y", "late");
  EXPECT_EQ(outputs_of(graph, 7), (std::vector<double>{1, 1, 1, 4, 4, 4, 7}));
}

TEST(Flow, AStateIsACircleWithOneToken) {
  auto graph = graph_on("cpu:2");
  graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("sum", function([](const Tensors& in) { return in[0] + in[1]; }),
             {.device = 1, .inputs = {"x", "old"}});
  graph.edge("count", "sum.x");
  graph.edge("sum", "sum.old", {.staleness = 1, .initial_shape = {1}});
  graph.output("y", "sum");
  EXPECT_EQ(outputs_of(graph, 5), (std::vector<double>{1, 3, 6, 10, 15}));
}

TEST(Flow, RatesJoinAndCutRows) {
  auto graph = graph_on("cpu:2");
  graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
  // Three of its values make one of the sum's, which gives two that the next takes one by one.
  graph.node("twice", function([](const Tensors& in) {
               return at::cat({in[0].sum().reshape({1}), in[0].max().reshape({1})});
             }),
             {.device = 1, .inputs = {"3*x"}, .outputs = {"2*y"}});
  std::vector<double> seen;
  graph.node("see", function([&](const Tensors& in) {
               seen.push_back(number(in[0]));
               return in[0];
             }),
             {.device = 0});
  graph.chain({"count", "twice", "see"});
  const auto compiled = compile(graph);
  EXPECT_EQ(compiled.firings, (std::vector<int64_t>{3, 1, 2}));
  Executor executor(compiled);
  executor.run(2);
  EXPECT_EQ(seen, (std::vector<double>{6, 3, 15, 6}));
}

TEST(Flow, RatesThatDoNotBalanceAreRefusedByName) {
  auto graph = graph_on("cpu");
  graph.node("a", counts(), {.outputs = {"y", "z"}});
  graph.node("b", function([](const Tensors& in) { return in[0]; }), {.inputs = {"2*x", "w"}});
  graph.edge("a.y", "b.x");
  graph.edge("a.z", "b.w");
  const auto text = error_of([&] { compile(graph); });
  EXPECT_TRUE(has(text, "edge 'a.z -> b.w'") && has(text, "no numbers of firings balance")) << text;
}

TEST(Flow, ANamedSizeIsTheSameInAndOut) {
  auto graph = graph_on("cpu");
  graph.input("x", {});
  graph.node("cut", function([](const Tensors& in) { return in[0].narrow(0, 0, 2); }),
             {.inputs = {"x:FP32[n,4]"}, .outputs = {"y:FP32[n,4]"}});
  graph.edge("x", "cut");
  graph.output("y", "cut");
  Executor executor(compile(graph));
  executor.step({at::zeros({2, 4})});
  const auto text = error_of([&] { executor.step({at::zeros({3, 4})}); });
  EXPECT_TRUE(has(text, "node 'cut' in round 1: output 'y' wants")) << text;
}

Graph loop_graph(int nearer, int judge) {
  auto graph = graph_on("cpu:2");
  graph.input("a:FP32[n]", {});
  add(graph, "guess", "scale:by=0.5", {.device = 0});
  add(graph, "nearer", "nearer", {.device = nearer});
  add(graph, "judge", "settled:by=1e-6", {.device = judge});
  graph.edge("a", "guess");
  graph.edge("a", "nearer.a");
  graph.edge("guess", "nearer.x");
  graph.edge("guess", "judge.old");
  graph.edge("nearer", "judge.new");
  graph.loop("refine", {.nodes = {"nearer", "judge"},
                        .carry = {{"judge.y", "nearer.x"}, {"judge.y", "judge.old"}},
                        .until = "judge.done",
                        .most = 50});
  graph.output("root", "judge.y");
  return graph;
}

TEST(Flow, ALoopRefinesUntilItSettles) {
  for (const auto& [nearer, judge] : {std::pair{0, 1}, {1, 0}, {1, 1}}) {
    Executor executor(compile(loop_graph(nearer, judge)));
    for (int round = 1; round <= 20; ++round) {
      const auto a = at::full({3}, double(round));
      EXPECT_TRUE(executor.step({a})[0].cpu().allclose(a.sqrt(), 1e-5, 1e-6)) << round;
    }
  }
}

TEST(Flow, ALoopThatCountsTurns) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("first", plus(1), {.device = 0});
  graph.node("second", plus(10), {.device = 1});
  graph.chain({"first", "second"});
  graph.edge("x", "first");
  graph.loop("turns",
             {.nodes = {"first", "second"}, .carry = {{"second.y", "first.x"}}, .most = 4});
  graph.output("y", "second");
  Executor executor(compile(graph));
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(number(executor.step({at::full({1}, double(i))})[0]), i + 44);
}

// Each loop meets on devices of its own, whatever it is called.
TEST(Flow, LoopsOfOneNameOrNoneAreApart) {
  for (const char* name : {"again", ""}) {
    auto graph = graph_on("cpu:4");
    graph.input("x", {});
    for (int i = 0; i < 4; ++i) graph.node(cat("n", i), plus(1), {.device = i});
    graph.edge("x", "n0");
    graph.chain({"n0", "n1", "n2", "n3"});
    graph.loop(name, {.nodes = {"n0", "n1"}, .carry = {{"n1", "n0"}}, .most = 3});
    graph.loop(name, {.nodes = {"n2", "n3"}, .carry = {{"n3", "n2"}}, .most = 5});
    graph.output("y", "n3");
    Executor executor(compile(graph));
    EXPECT_EQ(number(executor.step({at::zeros({1})})[0]), 2 * 3 + 2 * 5);
    const auto& regions = executor.compiled().graph.regions();
    EXPECT_FALSE(regions[0].name.empty() || regions[1].name.empty());
    EXPECT_EQ(regions[0].name == regions[1].name, *name != '\0');
  }
}

TEST(Flow, ABranchTakesOneWayOnEveryDevice) {
  for (const int device : {0, 1}) {
    auto graph = graph_on("cpu:3");
    graph.input("x:FP32[n]", {});
    add(graph, "gate", "above:than=10", {.device = 0});
    graph.node("small", plus(0.5), {.device = 1});
    graph.node("large", plus(-1000), {.device = 2});
    graph.edge("x", "gate");
    graph.edge("x", "small");
    graph.edge("x", "large");
    graph.branch("pick", {.when = "gate",
                          .then = {"large"},
                          .otherwise = {"small"},
                          .then_gives = "large",
                          .otherwise_gives = "small",
                          .device = device});
    graph.node("after", plus(0), {.device = 2});
    graph.edge("pick", "after");
    graph.output("y", "after");
    Executor executor(compile(graph));
    for (int i = 0; i < 40; ++i) {
      const double x = (i * 7) % 20;
      EXPECT_EQ(number(executor.step({at::full({2}, x)})[0]), x > 10 ? x - 1000 : x + 0.5);
    }
  }
}

TEST(Flow, WhatLeavesABranchByASideDoorIsRefused) {
  auto graph = graph_on("cpu");
  graph.input("x:FP32[n]", {});
  add(graph, "gate", "above");
  graph.node("small", plus(0.5));
  graph.node("large", plus(1));
  graph.node("after", plus(0));
  graph.edge("x", "gate");
  graph.edge("x", "small");
  graph.edge("x", "large");
  graph.branch("pick", {.when = "gate",
                        .then = {"large"},
                        .otherwise = {"small"},
                        .then_gives = "large",
                        .otherwise_gives = "small"});
  graph.edge("small", "after");
  const auto text = error_of([&] { compile(graph); });
  EXPECT_TRUE(has(text, "'small.y -> after.x' leaves an arm of branch 'pick'") &&
              has(text, "take 'pick.y'"))
      << text;
}

TEST(Flow, ARingGivesToTheNext) {
  auto graph = graph_on("cpu:3");
  std::vector<std::string> from, into;
  for (int i = 0; i < 3; ++i) {
    graph.node(cat("give", i), function(Function([i](const Tensors&, int64_t) -> Tensors {
                 return {at::full({1}, double(i))};
               })),
               {.device = i, .outputs = {"y"}});
    graph.node(cat("take", i), plus(0), {.device = i});
    from.push_back(cat("give", i)), into.push_back(cat("take", i));
  }
  graph.exchange(
      "ring", {.from = from, .into = into, .ring = true, .edge = {.transport = Transport::Send}});
  for (int i = 0; i < 3; ++i) graph.output(cat("y", i), cat("take", i));
  Executor executor(compile(graph));
  executor.run(3);
  const auto last = executor.last();
  EXPECT_EQ(number(last[0]), 2);
  EXPECT_EQ(number(last[1]), 0);
  EXPECT_EQ(number(last[2]), 1);
}

TEST(Flow, AGraphWithinAGraph) {
  auto inner = graph_on("cpu:2");
  inner.input("x:FP32[n]", {});
  inner.node("a", plus(1), {.device = 0});
  inner.node("b", plus(2), {.device = 1});
  inner.ensemble("both", "x", {.nodes = {"a", "b"}});
  inner.output("y", "both");
  auto graph = graph_on("cpu:3");
  graph.input("x:FP32[n]", {});
  graph.subgraph("first", inner, {1, 2});
  graph.subgraph("second", inner);
  graph.edge("x", "first.x");
  graph.edge("first.y", "second.x");
  graph.output("y", "second.y");
  const auto compiled = compile(graph);
  EXPECT_EQ(compiled.queue_of[size_t(compiled.graph.find("first/a"))], 1);
  Executor executor(compiled);
  EXPECT_EQ(number(executor.step({at::zeros({1})})[0]), 3);
}

TEST(Flow, CopiesWithinAGraphAreOnItsDevices) {
  auto inner = graph_on("cpu:2");
  inner.input("x", {});
  inner.node("a", plus(1), {.replicas = {1, 0}});
  inner.edge("x", "a");
  inner.output("y", "a");
  auto graph = graph_on("cpu:4");
  graph.input("x", {});
  graph.subgraph("part", inner, {3, 2});
  graph.edge("x", "part.x");
  graph.output("y", "part.y");
  const auto compiled = compile(graph);
  EXPECT_EQ(compiled.queue_of[size_t(compiled.graph.find("part/a"))], 2);
  EXPECT_EQ(compiled.queue_of[size_t(compiled.graph.find("part/a@1"))], 3);
  EXPECT_TRUE(has(error_of([&] { graph.subgraph("other", inner, {0}); }), "devices lists 1"));
}

TEST(Flow, WhatIsNotPinnedWithinAGraphIsOnItsDevices) {
  auto inner = graph_on("cpu:2");
  inner.input("x", {});
  for (const char* name : {"a", "b", "c"}) inner.node(name, plus(1));
  inner.chain({"a", "b", "c"});
  inner.edge("x", "a");
  inner.output("y", "c");
  auto middle = graph_on("cpu:4");  // one of them in one more: its devices are those of the outer
  middle.input("x", {});
  middle.subgraph("in", inner, {1, 2});
  middle.edge("x", "in.x");
  middle.output("y", "in.y");
  auto graph = graph_on("cpu:5");
  graph.input("x", {});
  graph.subgraph("one", inner, {3, 4});
  graph.subgraph("two", middle, {4, 2, 1, 0});
  graph.edge("x", "one.x"), graph.edge("one.y", "two.x");
  graph.output("y", "two.y");
  const auto compiled = compile(graph);
  std::set<int> one, two;
  for (size_t i = 0; i < compiled.graph.nodes().size(); ++i) {
    const auto& name = compiled.graph.nodes()[i].name;
    if (name.starts_with("one/")) one.insert(compiled.queue_of[i]);
    if (name.starts_with("two/in/")) two.insert(compiled.queue_of[i]);
  }
  EXPECT_EQ(one, (std::set{3, 4}));
  EXPECT_EQ(two, (std::set{1, 2}));
  Executor executor(compiled);
  EXPECT_EQ(number(executor.step({at::zeros({1})})[0]), 6);
}

TEST(Flow, ATransportIsTheSameMemoryOrACopy) {
  const auto same = [](Transport transport, int to) {
    auto graph = graph_on("cpu:2");
    Tensors given, taken;  // kept, so that no memory is used again
    graph.node("give",
               [&](at::Device device) {
                 return Body{.run = [&given, device](const Tensors&, int64_t firing) -> Tensors {
                   given.push_back(at::full({4}, double(firing), device));
                   return {given.back()};
                 }};
               },
               {.device = 0, .outputs = {"y"}});
    graph.node("take", function([&](const Tensors& in) {
                 taken.push_back(in[0]);
                 return in[0];
               }),
               {.device = to});
    graph.edge("give", "take", {.transport = transport});
    Executor executor(compile(graph));
    executor.run(3);
    int shared = 0;
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(taken[i].cpu().equal(given[i].cpu())) << i;
      shared += taken[i].data_ptr() == given[i].data_ptr();
    }
    EXPECT_TRUE(shared == 0 || shared == 3) << shared;
    return shared == 3;
  };
  for (const int to : {0, 1}) {
    EXPECT_TRUE(same(Transport::Auto, to)) << to;
    EXPECT_TRUE(same(Transport::Alias, to)) << to;
    EXPECT_FALSE(same(Transport::Copy, to)) << to;
    EXPECT_FALSE(same(Transport::Host, to)) << to;
  }
  EXPECT_FALSE(same(Transport::Send, 1));
  EXPECT_TRUE(same(Transport::Send, 0)) << "there is nobody to send to";
}

TEST(Flow, DropLosesTheNewAndLatestTheOld) {
  for (const auto policy : {Policy::Drop, Policy::Latest}) {
    auto graph = graph_on("cpu:2");
    Gate given;
    std::vector<double> seen;
    graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
    // After it in the row of its device: when this runs, the value has been given.
    graph.node("then", function(Function([&](const Tensors&, int64_t) -> Tensors {
                 given.come();
                 return {at::ones({1})};
               })),
               {.device = 0, .outputs = {"y"}});
    graph.node("slow", function([&](const Tensors& in) {
                 seen.push_back(number(in[0]));
                 return in[0];
               }),
               {.device = 1});
    graph.edge("count", "slow",
               {.capacity = 2, .policy = policy, .initial = -1, .initial_shape = {1}});
    int taken = 0;
    Executor executor(compile(graph), {.before = [&](int queue, const plan::Operation& operation) {
                        if (queue != 1 || operation.name != "slow") return;
                        // All of a run is given before the first is taken.
                        EXPECT_TRUE(given.await(taken++ < 3 ? 3 : 6));
                      }});
    executor.run(3);
    executor.run(3);
    const auto wanted = policy == Policy::Drop ? std::vector<double>{-1, 1, 1, 4, 5, 5}
                                               : std::vector<double>{2, 3, 3, 5, 6, 6};
    EXPECT_EQ(seen, wanted);
    const auto report = executor.report();
    const auto edge = std::ranges::find(report.edges, "count.y -> slow.x", &Report::OfEdge::name);
    ASSERT_NE(edge, report.edges.end());
    EXPECT_EQ(edge->values, 6);
    EXPECT_EQ(edge->lost, 3u) << "two of the first three, one of the others";
  }
}

TEST(Flow, APhaseStartsWhenAllBeforeIsDone) {
  for (const int held : {0, 1}) {
    auto graph = graph_on("cpu:3");
    Gate began;
    std::atomic<int> done{0}, done_at_start{-1};
    graph.node("late", function(Function([&](const Tensors&, int64_t) -> Tensors {
                 done_at_start = done.load();
                 began.come();
                 return {at::ones({1})};
               })),
               {.device = 2, .outputs = {"y"}, .phase = 1});
    for (const int device : {0, 1})
      graph.node(cat("early", device),
                 function(Function([&, device](const Tensors&, int64_t) -> Tensors {
                   // Nothing else keeps the late one back: it has this long to begin too early.
                   if (device == held) {
                     EXPECT_FALSE(began.await(1, 300ms));
                   }
                   ++done;
                   return {at::ones({1})};
                 })),
                 {.device = device, .outputs = {"y"}});
    Executor executor(compile(graph));
    executor.run(1);
    EXPECT_EQ(done_at_start, 2);
  }
}

// ---- regions within regions ----

// The order in which regions are declared is not that in which they lie.
void in_order(bool inner_first, const std::function<void()>& inner,
              const std::function<void()>& outer) {
  if (inner_first) inner();
  outer();
  if (!inner_first) inner();
}

void expect_gives(const Graph& graph, const std::vector<double>& given,
                  const std::function<double(double)>& wanted) {
  const auto error = error_of([&] {
    Executor executor(compile(graph), {.timeout = 60s});
    for (const double x : given)
      EXPECT_EQ(number(executor.step({at::full({2}, x)})[0]), wanted(x)) << x;
  });
  EXPECT_EQ(error, "no error");
}

TEST(Flow, ALoopInAnArmOfABranch) {
  for (const bool inner_first : {true, false})
    for (const int device : {0, 1}) {
      auto graph = graph_on("cpu:2");
      graph.input("x:FP32[n]", {});
      add(graph, "gate", "above:than=10", {.device = 0});
      graph.node("less", plus(-1), {.device = device});
      graph.node("more", plus(0.5), {.device = 1 - device});
      for (const char* name : {"gate", "less", "more"}) graph.edge("x", name);
      in_order(
          inner_first,
          [&] {
            graph.loop("shrink", {.nodes = {"less"}, .carry = {{"less", "less"}}, .most = 3});
          },
          [&] {
            graph.branch("pick", {.when = "gate",
                                  .then = {"less"},
                                  .otherwise = {"more"},
                                  .then_gives = "less",
                                  .otherwise_gives = "more"});
          });
      graph.output("y", "pick");
      SCOPED_TRACE(cat("inner first: ", inner_first, ", device ", device));
      expect_gives(graph, {16, 1, 32, 10, 11}, [](double x) { return x > 10 ? x - 3 : x + 0.5; });
    }
}

TEST(Flow, ABranchInALoop) {
  for (const bool inner_first : {true, false})
    for (const int device : {0, 1}) {
      auto graph = graph_on("cpu:2");
      graph.input("x:FP32[n]", {});
      graph.node("start", plus(0), {.device = 0});
      add(graph, "gate", "above:than=10", {.device = 0});
      graph.node("less", plus(-7), {.device = device});
      graph.node("more", plus(4), {.device = 1 - device});
      graph.node("end", plus(0), {.device = 1});
      graph.edge("x", "start");
      for (const char* name : {"gate", "less", "more"}) graph.edge("start", name);
      in_order(
          inner_first,
          [&] {
            graph.branch("pick", {.when = "gate",
                                  .then = {"less"},
                                  .otherwise = {"more"},
                                  .then_gives = "less",
                                  .otherwise_gives = "more"});
          },
          [&] {
            graph.loop("again", {.nodes = {"start", "gate", "less", "more", "end"},
                                 .carry = {{"end", "start"}},
                                 .most = 5});
          });
      graph.edge("pick", "end");
      graph.output("y", "end");
      SCOPED_TRACE(cat("inner first: ", inner_first, ", device ", device));
      expect_gives(graph, {1, 16, 7, 40}, [](double x) {
        for (int turn = 0; turn < 5; ++turn) x += x > 10 ? -7 : 4;
        return x;
      });
    }
}

TEST(Flow, ALoopInALoop) {
  for (const bool inner_first : {true, false})
    for (const int device : {0, 1}) {
      auto graph = graph_on("cpu:2");
      graph.input("x:FP32[n]", {});
      graph.node("start", plus(0), {.device = 0});
      graph.node("more", plus(1), {.device = device});
      add(graph, "twice", "scale:by=2", {.device = 1 - device});
      graph.chain({"x", "start", "more", "twice"});
      in_order(
          inner_first,
          [&] {
            graph.loop("inner", {.nodes = {"more"}, .carry = {{"more", "more"}}, .most = 3});
          },
          [&] {
            graph.loop(
                "outer",
                {.nodes = {"start", "more", "twice"}, .carry = {{"twice", "start"}}, .most = 4});
          });
      graph.output("y", "twice");
      SCOPED_TRACE(cat("inner first: ", inner_first, ", device ", device));
      expect_gives(graph, {0, 5, 64}, [](double x) {
        for (int turn = 0; turn < 4; ++turn) x = (x + 3) * 2;
        return x;
      });
    }
}

// ---- proof ----

TEST(Flow, TwoThatWaitForEachOtherAreShownWithACure) {
  auto graph = graph_on("cpu:2");
  graph.node("hen", plus(1), {.device = 0});
  graph.node("egg", plus(1), {.device = 1});
  graph.edge("hen", "egg");
  graph.edge("egg", "hen");
  const auto text = error_of([&] { check(compile(graph)); });
  EXPECT_TRUE(has(text, "hen") && has(text, "egg") && has(text, "hen.y -> egg.x") &&
              has(text, "egg.y -> hen.x"))
      << text;
  EXPECT_TRUE(has(text, "suggestion")) << text;
  EXPECT_TRUE(has(error_of([&] { Executor executor(compile(graph)); }), "would not run"));
  // What it suggests, said in the graph's own words: a round of delay.
  auto cured = graph_on("cpu:2");
  cured.node("hen", plus(1), {.device = 0});
  cured.node("egg", plus(1), {.device = 1});
  cured.edge("hen", "egg");
  cured.edge("egg", "hen", {.staleness = 1, .initial_shape = {1}});
  cured.output("y", "egg");
  EXPECT_EQ(outputs_of(cured, 3), (std::vector<double>{2, 4, 6}));
}

TEST(Flow, ACapacityThatIsTooSmallIsFound) {
  auto graph = graph_on("cpu:2");
  graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("three", function([](const Tensors& in) { return in[0].sum(); }),
             {.device = 1, .inputs = {"3*x"}});
  graph.edge("count", "three", {.capacity = 2});
  const auto text = error_of([&] { check(compile(graph)); });
  EXPECT_TRUE(has(text, "count.y -> three.x") && has(text, "(on that edge: capacity = 3)")) << text;
  auto cured = graph_on("cpu:2");
  cured.node("count", counts(), {.device = 0, .outputs = {"y"}});
  cured.node("three", function([](const Tensors& in) { return in[0].sum(); }),
             {.device = 1, .inputs = {"3*x"}});
  cured.edge("count", "three", {.capacity = 3});
  check(compile(cured));
}

// A round of delay is as many values as a round has, and they must fit.
TEST(Flow, ACureIsInTheKeysOfTheEdge) {
  const auto circle = [](EdgeOptions back) {
    auto graph = graph_on("cpu:2");
    for (const int at : {0, 1})
      graph.node(
          cat("n", at), plus(1),
          {.device = at, .inputs = {at == 0 ? "3*x" : "x"}, .outputs = {at == 0 ? "3*y" : "y"}});
    graph.edge("n0", "n1"), graph.edge("n1", "n0", back);
    return compile(graph);
  };
  const auto text = error_of([&] { check(circle({})); });
  EXPECT_TRUE(has(text, "hold 3 values") && has(text, "'n1.y -> n0.x'") &&
              has(text, "(on that edge: staleness = 1, with"))
      << text;
  check(circle({.staleness = 1, .initial_shape = {1}}));
  EXPECT_TRUE(has(error_of([&] { check(circle({.capacity = 3})); }), "staleness = 1, with"));
}

TEST(Flow, ACureOfPhasesIsAPhase) {
  const auto phases = [](int of_b) {
    auto graph = graph_on("cpu:2");
    graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
    graph.node("a", plus(1), {.device = 0, .phase = 3});
    graph.node("b", plus(1), {.device = 1, .phase = of_b});
    graph.chain({"data", "a", "b"});
    return compile(graph);
  };
  const auto text = error_of([&] { check(phases(0)); });
  EXPECT_TRUE(has(text, "(phase = 3 in node 'b')")) << text;
  check(phases(3));
}

TEST(Flow, ShapesThatDisagreeAreFoundBeforeItRuns) {
  auto graph = graph_on("cpu");
  graph.input("x:FP32[b,4]", {});
  graph.node("a", plus(0), {.inputs = {"x:FP32[n,4]"}, .outputs = {"y:FP32[n,8]"}});
  graph.node("b", plus(0), {.inputs = {"x:FP32[n,16]"}});
  graph.edge("x", "a");
  graph.edge("a", "b");
  const auto text = error_of([&] { check(compile(graph)); });
  EXPECT_TRUE(has(text, "a.y -> b.x") && has(text, "8") && has(text, "16")) << text;
}

TEST(Flow, TwoQueuesThatWriteOneValueAreARace) {
  auto graph = graph_on("cpu:2");
  graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
  graph.node("writer", function([](const Tensors& in) { return in[0].add_(1); }),
             {.device = 1, .in_place = true});
  graph.node("reader", plus(0), {.device = 0});
  graph.edge("count", "writer", {.transport = Transport::Alias});
  graph.edge("count", "reader");
  const auto knot = compile(graph).knot();
  ASSERT_TRUE(knot);
  EXPECT_EQ(knot->rule, plan::Rule::Races);
  EXPECT_TRUE(has(knot->what, "writer") && has(knot->what, "reader")) << knot->what;
}

TEST(Flow, LatestAndDropAreDeadlockFreeAndSaidNotToBeDeterministic) {
  for (const auto policy : {Policy::Latest, Policy::Drop}) {
    auto graph = graph_on("cpu:2");
    graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
    graph.node("slow", function([](const Tensors& in) {
                 std::this_thread::sleep_for(1ms);
                 return in[0];
               }),
               {.device = 1});
    graph.edge("count", "slow", {.capacity = 1, .policy = policy, .initial_shape = {1}});
    graph.output("y", "slow");
    const auto compiled = compile(graph);
    EXPECT_EQ(compiled.verdict(), "deadlock-free, not deterministic");
    Executor executor(compiled);
    executor.run(50);
    const double last = number(executor.last()[0]);
    EXPECT_GE(last, 0);
    EXPECT_LE(last, 50);
    if (policy == Policy::Latest) {
      EXPECT_EQ(last, 50) << "the newest is there when all has been given";
    }
  }
  auto graph = graph_on("cpu");
  graph.node("a", plus(0));
  graph.node("b", plus(0));
  EXPECT_TRUE(
      has(error_of([&] { graph.edge("a", "b", {.gradients = true, .policy = Policy::Latest}); }),
          "gradients may not be lost"));
  EXPECT_TRUE(has(error_of([&] {
                    graph.edge("a", "b", {.transport = Transport::Send, .policy = Policy::Drop});
                  }),
                  "two ends that wait"));
}

TEST(Flow, PlacesKeepTogetherAndApart) {
  auto graph = graph_on("cpu:3");
  for (const char* name : {"a", "b", "c", "d"}) graph.node(name, counts(), {.outputs = {"y"}});
  graph.colocate({"a", "d"});
  graph.separate({"a", "b", "c"});
  const auto compiled = compile(graph);
  const auto& at = compiled.queue_of;
  EXPECT_EQ(at[0], at[3]);
  EXPECT_EQ((std::set<int>{at[0], at[1], at[2]}).size(), 3u);
  EXPECT_TRUE(has(compiled.placement(), kGpu ? "cuda:0#0" : "cpu#0"));
  auto narrow = graph_on("cpu:2");
  for (const char* name : {"a", "b", "c"}) narrow.node(name, counts(), {.outputs = {"y"}});
  narrow.separate({"a", "b", "c"});
  EXPECT_TRUE(has(error_of([&] { compile(narrow); }), "only 2 devices"));
  auto crossed = graph_on("cpu:2");  // the first two on two devices leave none to the third
  for (const char* name : {"a", "c", "b"}) crossed.node(name, counts(), {.outputs = {"y"}});
  crossed.separate({"a", "b"}), crossed.separate({"c", "b"});
  EXPECT_EQ(compile(crossed).queue_of, (std::vector<int>{0, 0, 1}));
  auto pinned = graph_on("cpu:2");
  pinned.node("a", counts(), {.device = 0, .outputs = {"y"}});
  pinned.node("b", counts(), {.device = 1, .outputs = {"y"}});
  pinned.colocate({"a", "b"});
  EXPECT_TRUE(has(error_of([&] { compile(pinned); }), "is pinned to device"));
}

TEST(Flow, MemoryThatDoesNotSufficeIsRefused) {
  Graph graph({.memory_gb = 1e-6});
  graph.input("x:FP32[n,2]", {});
  add(graph, "model", "mlp:2,64,64,3");
  graph.edge("x", "model");
  const auto text = error_of([&] { compile(graph); });
  EXPECT_TRUE(has(text, "the nodes on cpu need") && has(text, "flow.memory_gb")) << text;
}

TEST(Flow, AChannelSaysWhetherItsValuesMove) {
  for (const auto& [transport, devices, moves] :
       {std::tuple(Transport::Auto, "cpu:2", false), std::tuple(Transport::Host, "cpu:2", true),
        std::tuple(Transport::Copy, "cpu", true), std::tuple(Transport::Alias, "cpu", false)}) {
    auto graph = graph_on(devices);
    graph.node("count", counts(), {.device = 0, .outputs = {"y"}});
    graph.node("late", plus(0));
    graph.edge("count", "late", {.transport = transport});
    EXPECT_EQ(compile(graph).program.channels.at(0).moves, std::optional(moves)) << devices;
  }
}

// By their number the second large one would be beside the first, on a device that has room for
// one.
TEST(Flow, WhatDoesNotFitByNumberIsPlacedByBytes) {
  const topo::Device host, other{.kind = topo::DeviceKind::Cuda};
  const auto of_bytes = [](uint64_t bytes) {
    return [bytes](at::Device) {
      auto body = plus(1)(at::kCPU);
      body.bytes = bytes;
      return body;
    };
  };
  const auto placed = [&](int number, double memory_gb) {
    Graph graph({.devices = {host, other}, .memory_gb = memory_gb});
    graph.input("x", {}, 0);
    std::vector<std::string> names{"x"};
    for (int i = 0; i < number; ++i) {
      graph.node(cat("large", i), of_bytes(600'000));
      graph.node(cat("small", i), of_bytes(0));
      names.insert(names.end(), {cat("large", i), cat("small", i)});
    }
    graph.chain(names);
    return compile(graph).queue_of;
  };
  EXPECT_EQ(placed(2, 0.002), (std::vector<int>{0, 1, 0, 1, 0})) << "by number, where it fits";
  const auto apart = placed(2, 0.001);
  EXPECT_NE(apart[1], apart[3]);
  const auto text = error_of([&] { placed(3, 0.001); });
  EXPECT_TRUE(has(text, "need 1.14 MiB")) << text;
}

// ---- failure ----

TEST(Flow, AFailureNamesNodeRoundAndShapesAndTheNextStepWorks) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("a", plus(1), {.device = 0});
  graph.node("b", function([](const Tensors& in) {
               if (number(in[0]) < 0) fail(Kind::Usage, "no roots of negative numbers");
               return in[0].sqrt();
             }),
             {.device = 1});
  graph.chain({"a", "b"});
  graph.edge("x", "a");
  graph.output("y", "b");
  Executor executor(compile(graph), {.timeout = 5s});
  EXPECT_EQ(number(executor.step({at::full({2}, 3.0)})[0]), 2);
  for (int i = 0; i < 3; ++i) {
    const auto text = error_of([&] { executor.step({at::full({2}, -3.0)}); });
    EXPECT_TRUE(
        has(text, cat("node 'b' failed in round ", 2 * i + 1, ": no roots of negative numbers")))
        << text;
    EXPECT_TRUE(has(text, "it was given x FP32[2]")) << text;
    EXPECT_EQ(number(executor.step({at::full({2}, 8.0)})[0]), 3);
  }
}

TEST(Flow, AValueOfTheWrongShapeIsRefusedWithWhatWasWanted) {
  auto graph = graph_on("cpu");
  graph.input("x:FP32[n]", {});
  graph.node("a", function([](const Tensors& in) { return in[0].unsqueeze(0); }),
             {.inputs = {"x"}, .outputs = {"y:FP32[n]"}});
  graph.edge("x", "a");
  graph.output("y", "a");
  Executor executor(compile(graph));
  const auto text = error_of([&] { executor.step({at::ones({3})}); });
  EXPECT_TRUE(has(text, "node 'a' in round 0: output 'y' wants FP32[a.n], got FP32[1,3]")) << text;
  EXPECT_TRUE(has(error_of([&] { executor.step({}); }), "takes 1 inputs (x), got 0"));
}

TEST(Flow, AWaitThatIsTooLongIsAnErrorThatTellsWhoIsWhere) {
  auto graph = graph_on("cpu:2");
  std::atomic<bool> stuck{true};
  graph.node("stuck", function(Function([&](const Tensors&, int64_t) -> Tensors {
               for (int i = 0; i < 60 && stuck; ++i) std::this_thread::sleep_for(10ms);
               return {at::ones({1})};
             })),
             {.device = 0, .outputs = {"y"}});
  graph.node("waits", plus(0), {.device = 1});
  graph.chain({"stuck", "waits"});
  Executor executor(compile(graph), {.timeout = 200ms});
  const auto text = error_of([&] { executor.run(1); });
  stuck = false;
  EXPECT_TRUE(
      has(text, "waited 0.2 s (flow.timeout_s) for a value of 'stuck.y -> waits.x' in round 0"))
      << text;
  EXPECT_TRUE(has(text, "rank 0: stuck #0")) << text;
}

TEST(Flow, ItCanBeStoppedFromOutside) {
  auto graph = graph_on("cpu:2");
  graph.node("tick", function(Function([](const Tensors&, int64_t) -> Tensors {
               std::this_thread::sleep_for(1ms);
               return {at::ones({1})};
             })),
             {.device = 0, .outputs = {"y"}});
  graph.node("tock", plus(0), {.device = 1});
  graph.chain({"tick", "tock"});
  Executor executor(compile(graph));
  std::jthread stopper([&] {
    std::this_thread::sleep_for(50ms);
    executor.stop("enough");
  });
  EXPECT_TRUE(has(error_of([&] { executor.run(100000); }), "the flow was stopped: enough"));
}

TEST(Flow, ASlowConsumerBoundsWhatIsMade) {
  auto graph = graph_on("cpu:2");
  std::atomic<int> made{0}, used{0}, most{0};
  graph.node("fast", function(Function([&](const Tensors&, int64_t) -> Tensors {
               most = std::max(most.load(), ++made - used.load());
               return {at::ones({1})};
             })),
             {.device = 0, .outputs = {"y"}});
  graph.node("slow", function([&](const Tensors& in) {
               std::this_thread::sleep_for(2ms);
               ++used;
               return in[0];
             }),
             {.device = 1});
  graph.edge("fast", "slow", {.capacity = 3});
  Executor executor(compile(graph));
  executor.run(40);
  EXPECT_LE(most, 3 + 2);  // that wait, that is made and that is used
  EXPECT_GE(most, 4);
}

// ---- figures ----

TEST(Flow, TheBottleneckIsNamed) {
  const auto named = [](double loader_ms, double node_ms, int64_t bytes) {
    auto graph = graph_on("cpu:2");
    const auto sleeps = [](double ms) {
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
    };
    auto value = std::make_shared<at::Tensor>(at::ones({bytes / 4}));
    graph.node("load", function(Function([=](const Tensors&, int64_t) -> Tensors {
                 sleeps(loader_ms);
                 return {*value};
               })),
               {.device = 0, .outputs = {"y"}});
    graph.node("work", function([=](const Tensors& in) {
                 sleeps(node_ms);
                 return in[0];
               }),
               {.device = 1});
    graph.edge("load", "work", {.transport = Transport::Host});
    Executor executor(compile(graph));
    executor.run(20);
    const auto report = parse_report(executor.report().json());
    EXPECT_TRUE(has(report.table(), "load.y -> work.x"));
    return report.bottleneck();
  };
  EXPECT_TRUE(has(named(5, 1, 4), "loader 'load' on "));
  EXPECT_TRUE(has(named(1, 5, 4), "node 'work' on "));
  EXPECT_TRUE(has(named(0.1, 0.1, 64 << 20), "edge 'load.y -> work.x'"));
}

TEST(Flow, TheBottleneckIsOnTheDeviceThatIsBusiest) {
  Report report{.seconds = 1};
  for (int i = 0; i < 10; ++i)
    report.nodes.push_back({.name = cat("small", i), .queue = "cpu#0", .compute_s = 0.08});
  report.nodes[3].back_s = 0.01;
  report.nodes.push_back({.name = "middling", .queue = "cpu#1", .compute_s = 0.3});
  EXPECT_EQ(report.bottleneck(),
            "node 'small3' on cpu#0: it computes 9 % of the time, and all that is there 81 %");
  report.edges = {{.name = "a.y -> b.x", .queue = "cpu#1", .values = 2, .bytes = 8, .move_s = 0.6}};
  EXPECT_EQ(report.bottleneck(),
            "edge 'a.y -> b.x': 60 % of the time its values are moved, 4 B each");
}

TEST(Flow, WaitingWhereQueuesMeetIsInTheFigures) {
  auto graph = loop_graph(0, 1);
  graph.node("late", plus(0), {.device = 1, .phase = 1});
  graph.edge("judge", "late");
  Executor executor(compile(graph));
  executor.step({at::full({3}, 2.0)});
  const auto report = executor.report();
  for (const char* name : {"loop refine", "phases"}) {
    const auto row = std::ranges::find(report.edges, name, &Report::OfEdge::name);
    ASSERT_NE(row, report.edges.end()) << name;
    EXPECT_GT(row->values, 0) << name;
    EXPECT_GT(row->wait_s, 0) << name;
  }
}

TEST(Flow, EveryBeginsAnewAfterAFailure) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("a", function([](const Tensors& in) {
               if (number(in[0]) < 0) fail(Kind::Usage, "negative");
               return in[0];
             }),
             {.device = 0});
  graph.node("b", plus(0), {.device = 1});
  graph.edge("x", "a");
  graph.edge("a", "b", {.every = 2});
  graph.output("y", "b");
  Executor executor(compile(graph));
  EXPECT_EQ(number(executor.step({at::full({1}, 1.0)})[0]), 1);
  EXPECT_TRUE(has(error_of([&] { executor.step({at::full({1}, -1.0)}); }), "negative"));
  EXPECT_EQ(number(executor.step({at::full({1}, 5.0)})[0]), 5);
  EXPECT_EQ(number(executor.step({at::full({1}, 6.0)})[0]), 5);
  EXPECT_EQ(executor.report().rounds, 4);
}

TEST(Flow, WordsThatDoNotExistAndBadArgumentsAreTold) {
  EXPECT_FALSE(find_word("no_such_word", 1, ""));
  EXPECT_TRUE(has(error_of([] { find_word("spirals:batch=x", 1, ""); }), "wants a number"));
  EXPECT_TRUE(has(error_of([] { find_word("spirals:bath=3", 1, ""); }), "no argument 'bath'"));
  const std::vector<std::pair<std::string, std::string>> cases{
      {"scale:3", "'scale:3': got '3', which names no argument; 'scale' takes by=2, as scale:by=2"},
      {"above:0.7", "as above:than=0.5"},
      {"sleep:50", "as sleep:ms=5"},
      {"noise:batch=4,7", "got '7', which names no argument; 'noise' takes batch=64, dim=2"},
      {"same:3", "'same' takes no arguments"},
      {"scale:by=2,by=3", "'by' is said twice"},
      {"mlp:2,3.7,3", "'mlp:2,3.7,3': got '3.7', and an mlp wants its sizes, whole numbers from 1"},
      {"mlp:2,hidden=3", "got 'hidden=3'"},
      {"mlp:0,3", "got '0'"},
      {"mlp:1e30,3", "got '1e30'"},
      {"mlp:3", "'mlp:3' wants two sizes or more"},
      {"mlp", "as mlp:2,32,3"}};
  for (const auto& [text, wanted] : cases) {
    const auto error = error_of([&] { find_word(text, 1, ""); });
    EXPECT_TRUE(has(error, wanted)) << text << ": " << error;
  }
  auto graph = graph_on("cpu");
  graph.node("teacher", plus(0));
  EXPECT_TRUE(has(error_of([&] { graph.edge("teacher", "techer"); }), "did you mean teacher?"));
  EXPECT_TRUE(
      has(error_of([&] { graph.edge("teacher.z", "teacher"); }), "no output 'z'; there are: y"));
  EXPECT_TRUE(has(error_of([&] { graph.node("far", plus(0), {.device = 3}); }),
                  "device 3, and the flow has 1"));
  EXPECT_TRUE(has(error_of([&] { compile(graph); }), "input 'teacher.x' has no edge"));
  // Though without it nothing reaches the loss either.
  auto trained = graph_on("cpu");
  add(trained, "data", "spirals"), add(trained, "net", "mlp:2,3", {.role = Role::Train});
  add(trained, "loss", "cross_entropy");
  trained.edge("data.x", "net"), trained.edge("data.label", "loss.x");
  EXPECT_TRUE(has(error_of([&] { compile(trained); }), "input 'loss.label' has no edge"));
  trained.node("source", counts(), {.outputs = {"z"}});
  EXPECT_TRUE(has(error_of([&] { trained.edge("net", "source"); }),
                  "node 'source' has no input; a node that says one side alone has none on the "
                  "other: say input = [\"x\"] too"));
}

}  // namespace
}  // namespace yoke::flow
