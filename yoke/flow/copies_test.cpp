// SPDX-License-Identifier: Apache-2.0
// Copies over which rows are cut, of whole patterns: what they compute is what one of it does.
#include <gtest/gtest.h>

#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

std::vector<double> values(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kCPU, at::kDouble).reshape({-1}).contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

void expect_rows(const Graph& graph, const std::vector<std::vector<double>>& given,
                 const std::vector<std::vector<double>>& wanted) {
  const auto error = error_of([&] {
    auto compiled = compile(graph);
    const auto knot = compiled.knot({});
    EXPECT_FALSE(knot) << knot->what;
    Executor executor(std::move(compiled), {.timeout = std::chrono::seconds(60)});
    for (size_t i = 0; i < given.size(); ++i)
      EXPECT_EQ(values(executor.step({at::tensor(given[i]).to(at::kFloat)})[0]), wanted[i]) << i;
  });
  EXPECT_EQ(error, "no error");
}

TEST(Copies, OfALoopTurnsEachAsItsRowsWant) {
  for (const bool parts : {false, true})  // each copy on two devices
    for (const bool decider_last : {false, true}) {
      auto graph = graph_on("cpu:4");
      graph.input("x:FP32[n]", {});
      graph.node("more", plus(3));
      add(graph, "enough", "above:than=10");
      graph.edge("x", "more"), graph.edge("more", "enough");
      graph.loop("grow", {.nodes = {"more", "enough"},
                          .carry = {{"more", "more"}},
                          .until = "enough",
                          .most = 100});
      graph.output("y", "more");
      Graph::Split split{.nodes = {"enough", "more"},
                         .devices = {{0, parts ? 1 : 0}, {2, parts ? 3 : 2}}};
      if (decider_last) std::ranges::reverse(split.nodes);
      graph.data_parallel("copies", split);
      SCOPED_TRACE(cat(parts, decider_last));
      expect_rows(graph, {{1, 1, 9, 9}, {20, 20, 7, 7}}, {{13, 13, 12, 12}, {23, 23, 13, 13}});
    }
}

TEST(Copies, OfALoopOfOneRowAreDoneWhereThereIsNone) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  add(graph, "nearer", "nearer"), add(graph, "judge", "settled:by=1e-3");
  graph.edge("x", "nearer.x"), graph.edge("x", "nearer.a");
  graph.edge("nearer", "judge.new"), graph.edge("x", "judge.old");
  graph.loop("refine", {.nodes = {"nearer", "judge"},
                        .carry = {{"judge.y", "nearer.x"}, {"judge.y", "judge.old"}},
                        .until = "judge.done",
                        .most = 50});
  graph.output("y", "judge.y");
  graph.data_parallel("copies", {.nodes = {"nearer", "judge"}, .devices = {{0, 0}, {1, 1}}});
  Executor executor(compile(graph));
  EXPECT_NEAR(number(executor.step({at::full({1}, 9.0f)})[0]), 3, 1e-3);
}

TEST(Copies, OfALoopOfSoManyTurnsAreOneLoop) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("start", plus(0));
  graph.node("more", plus(1));
  add(graph, "twice", "scale:by=2");
  graph.chain({"x", "start", "more", "twice"});
  graph.loop("outer",
             {.nodes = {"start", "more", "twice"}, .carry = {{"twice", "start"}}, .most = 4});
  graph.loop("inner", {.nodes = {"more"}, .carry = {{"more", "more"}}, .most = 3});
  graph.output("y", "twice");
  graph.data_parallel("copies",
                      {.nodes = {"start", "more", "twice"}, .devices = {{0, 0, 1}, {1, 0, 0}}});
  const auto one = [](double x) {
    for (int turn = 0; turn < 4; ++turn) x = (x + 3) * 2;
    return x;
  };
  expect_rows(graph, {{0, 1, 2}, {5}}, {{one(0), one(1), one(2)}, {one(5)}});
}

TEST(Copies, OfSomeNodesOfALoopStandInIt) {
  auto graph = graph_on("cpu:3");
  graph.input("x:FP32[n]", {});
  graph.node("start", plus(0), {.device = 2});
  graph.node("more", plus(1));
  graph.node("end", plus(1), {.device = 2});
  graph.chain({"x", "start", "more", "end"});
  graph.loop("again", {.nodes = {"start", "more", "end"}, .carry = {{"end", "start"}}, .most = 5});
  graph.output("y", "end");
  graph.data_parallel("copies", {.nodes = {"more"}, .devices = {{0}, {1}}});
  expect_rows(graph, {{0, 1, 2, 3}, {5, 6}}, {{10, 11, 12, 13}, {15, 16}});
}

// One less or a half more, as a node "gate" says that is in the graph.
void pick(Graph& graph) {
  graph.node("less", plus(-1), {.device = 0}), graph.node("more", plus(0.5), {.device = 1});
  graph.edge("x", "less"), graph.edge("x", "more");
  graph.branch("pick", {.when = "gate",
                        .then = {"less"},
                        .otherwise = {"more"},
                        .then_gives = "less",
                        .otherwise_gives = "more"});
}

// Decided by the mean of the rows, on two devices.
Graph choice() {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  add(graph, "gate", "above:than=10", {.device = 0});
  graph.edge("x", "gate");
  pick(graph);
  return graph;
}

TEST(Copies, OfABranchChooseByTheirRows) {
  for (const bool decided_within : {true, false})
    for (const bool swapped : {false, true}) {
      auto graph = choice();
      graph.output("y", "pick");
      Graph::Split split{.nodes = {"less", "more"}, .devices = {{0, 1}, {1, int(swapped)}}};
      if (decided_within) {
        split.nodes.insert(split.nodes.begin(), "gate");
        for (auto& devices : split.devices) devices.insert(devices.begin(), devices[0]);
      }
      graph.data_parallel("copies", split);
      SCOPED_TRACE(cat("decided within: ", decided_within, ", swapped: ", swapped));
      // Cut or whole, the mean of what the gate sees decides.
      if (decided_within)
        expect_rows(graph, {{20, 30, 1, 2}, {1, 2, 20, 30}},
                    {{19, 29, 1.5, 2.5}, {1.5, 2.5, 19, 29}});
      else
        expect_rows(graph, {{20, 30, 1, 2}, {1, 2, 3, 4}}, {{19, 29, 0, 1}, {1.5, 2.5, 3.5, 4.5}});
    }
}

TEST(Copies, OfANodeInAnArmStandInIt) {
  auto graph = choice();
  graph.output("y", "pick");
  graph.data_parallel("copies", {.nodes = {"less"}, .devices = {{0}, {1}}});
  expect_rows(graph, {{20, 30, 1, 2}, {1, 2}}, {{19, 29, 0, 1}, {1.5, 2.5}});
}

TEST(Copies, OfABranchLeaveItByTheirName) {
  auto graph = choice();
  graph.data_parallel("copies",
                      {.nodes = {"gate", "less", "more"}, .devices = {{0, 0, 0}, {1, 1, 1}}});
  graph.output("y", "copies.y");
  expect_rows(graph, {{20, 1}}, {{19, 1.5}});
}

TEST(Copies, OfWhatAnEnsembleDecidesHaveTheirOwn) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  add(graph, "high", "above:than=10"), add(graph, "low", "above:than=5");
  graph.ensemble("gate", "x", {.nodes = {"high", "low"}});
  pick(graph);
  graph.output("y", "pick");
  graph.data_parallel("copies", {.nodes = {"high", "low", "less", "more"},
                                 .devices = {{0, 0, 0, 0}, {1, 1, 1, 1}}});
  EXPECT_GE(graph.find("gate@1"), 0);
  expect_rows(graph, {{7, 1}, {20, 6}}, {{6, 1.5}, {19, 5}});
}

TEST(Copies, OfEnsemblesOfEnsemblesHaveAllMergesBetween) {
  auto graph = graph_on("cpu:3");
  graph.input("x:FP32[n]", {});
  graph.node("a", plus(1)), graph.node("b", plus(3)), graph.node("c", plus(10));
  graph.node("sum", function([](const Tensors& in) { return in[0].sum(0); }));
  graph.ensemble("both", "x", {.nodes = {"a", "b"}});
  graph.ensemble("all", "", {.nodes = {"both", "c"}, .merge = "stack"});
  graph.edge("x", "c"), graph.edge("all", "sum");
  graph.output("y", "sum");
  graph.data_parallel("copies", {.nodes = {"a", "b", "c", "sum"},
                                 .devices = {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}}});
  EXPECT_GE(graph.find("both@2"), 0);
  expect_rows(graph, {{1, 2, 3}, {4}}, {{14, 16, 18}, {20}});  // of one row two copies have none
}

TEST(Copies, OfNodesAroundASubgraphTakeItIn) {
  for (const bool placed : {false, true}) {
    Graph inner({.devices = topo::parse_devices("cpu")});
    inner.input("a:FP32[n]", {});
    inner.node("inc", plus(1));
    inner.edge("a", "inc"), inner.output("r", "inc");
    auto graph = graph_on("cpu:2");
    graph.input("x:FP32[n]", {});
    graph.node("pre", plus(2)), graph.node("post", plus(4));
    graph.subgraph("sub", inner, placed ? std::vector{0} : std::vector<int>{});
    graph.edge("x", "pre"), graph.edge("pre", "sub.a"), graph.edge("sub.r", "post");
    graph.output("y", "post");
    graph.data_parallel("copies",
                        {.nodes = {"pre", "sub/inc", "post"}, .devices = {{0, 0, 0}, {1, 1, 1}}});
    EXPECT_GE(graph.find("sub/a@1"), 0);
    expect_rows(graph, {{1, 2, 3}}, {{8, 9, 10}});
  }
}

TEST(Copies, OfASubgraphLeaveTheDevicesThatItHad) {
  Graph inner({.devices = topo::parse_devices("cpu")});
  inner.input("x:FP32[n]", {});
  inner.node("a", plus(1)), inner.node("b", plus(2));
  for (const std::string name : {"a", "b"}) {
    inner.node("sum_" + name, function([](const Tensors& in) { return in[0] + in[1].sum(0); }),
               {.inputs = {"x", "peers"}});
    inner.edge("x", name), inner.edge(name, "sum_" + name + ".x");
  }
  inner.exchange("talk", {.from = {"a", "b"}, .into = {"sum_a.peers", "sum_b.peers"}});
  inner.output("y", "sum_a");
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.subgraph("sub", inner, {0});
  graph.edge("x", "sub.x"), graph.output("y", "sub.y");
  graph.data_parallel("copies", {.nodes = {"sub/a", "sub/b", "sub/sum_a", "sub/sum_b"},
                                 .devices = {{0, 0, 0, 0}, {1, 1, 1, 1}}});
  expect_rows(graph, {{1, 2, 3}}, {{5, 7, 9}});
}

TEST(Copies, OfAnEnsembleHaveItsMergeBetween) {
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("a", plus(1)), graph.node("b", plus(3));
  add(graph, "twice", "scale:by=2");
  graph.ensemble("both", "x", {.nodes = {"a", "b"}, .merge = "stack"});
  graph.node("sum", function([](const Tensors& in) { return in[0].sum(0); }));
  graph.chain({"both", "sum", "twice"});
  graph.output("y", "twice");
  graph.data_parallel(
      "copies", {.nodes = {"a", "b", "sum", "twice"}, .devices = {{0, 0, 0, 0}, {1, 1, 1, 1}}});
  EXPECT_GE(graph.find("both@1"), 0);
  expect_rows(graph, {{1, 2, 3}}, {{12, 16, 20}});
}

// Two that learn from each other, and their losses.
Graph students(const std::string& devices, const EdgeOptions& edge = {}) {
  auto graph = graph_on(devices);
  add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
  for (const std::string name : {"ann", "bob"}) {
    add(graph, name, "mlp:2,16,3", {.role = Role::Train, .optimizer = {.lr = 0.2}});
    add(graph, name + "_loss", "mutual");
    graph.edge("data.x", name);
    graph.edge(name, name + "_loss.x");
    graph.edge("data.label", name + "_loss.label");
  }
  graph.exchange(
      "talk", {.from = {"ann", "bob"}, .into = {"ann_loss.peers", "bob_loss.peers"}, .edge = edge});
  return graph;
}

void expect_equal_training(Graph one, Graph copied, const std::vector<std::string>& nets,
                           int64_t rounds) {
  Executor alone(compile(std::move(one))), together(compile(std::move(copied)));
  alone.run(rounds), together.run(rounds);
  for (const auto& net : nets)
    for (size_t i = 0; i < alone.weights(net).size(); ++i) {
      const auto& weight = together.weights(net)[i];
      EXPECT_TRUE(alone.weights(net)[i].allclose(weight, kClose, kClose)) << net << " " << i;
      EXPECT_TRUE(weight.equal(together.weights(net + "@1")[i])) << net << " " << i;
    }
}

TEST(Copies, OfMutualLearningLearnWhatOneDoes) {
  const Graph::Split split{.nodes = {"ann", "bob", "ann_loss", "bob_loss"},
                           .devices = {{0, 1, 0, 1}, {2, 3, 2, 3}}};
  // At once, and with what the other said two rounds ago.
  for (const EdgeOptions& edge :
       {EdgeOptions{}, EdgeOptions{.staleness = 2, .initial = 0.5, .initial_shape = {32, 3}}}) {
    auto copied = students("cpu:4", edge);
    copied.data_parallel("copies", split);
    EXPECT_GE(copied.find("talk-ann_loss@1"), 0);
    expect_equal_training(students("cpu", edge), copied, {"ann", "bob"}, 20);
  }
}

TEST(Copies, OfModelsThatTradeAreOneTrade) {
  for (const auto what : {Exchange::What::Weights, Exchange::What::Gradients})
    for (const bool ring : {false, true}) {
      const auto make = [&](const std::string& devices) {
        auto graph = students(devices);
        graph.exchange({.what = what, .name = "trade", .ring = ring, .staleness = 1},
                       {"ann", "bob"});
        return graph;
      };
      auto copied = make("cpu:4");
      // The models of the two copies stand in another order on their devices.
      copied.data_parallel("copies", {.nodes = {"ann", "bob", "ann_loss", "bob_loss"},
                                      .devices = {{0, 1, 0, 1}, {3, 2, 3, 2}}});
      expect_equal_training(make("cpu"), copied, {"ann", "bob"}, 12);
    }
}

TEST(Copies, OfModelsThatShareWeightsShareTheirOwn) {
  const auto make = [](const std::string& devices) {
    auto graph = graph_on(devices);
    const OptimizerOptions sgd{.lr = 0.05};
    add(graph, "noise", "noise:batch=16,dim=4", {.device = 0});
    add(graph, "real", "circle:batch=16", {.device = 0});
    add(graph, "painter", "mlp:4,8,2", {.role = Role::Train, .optimizer = sgd});
    add(graph, "critic", "mlp:2,8,1", {.role = Role::Train, .optimizer = sgd});
    add(graph, "of_fake", "mlp:2,8,1", {.role = Role::Train, .weights_of = "critic"});
    add(graph, "critic_loss", "tells_apart");
    add(graph, "judge", "mlp:2,8,1", {.role = Role::Frozen, .weights_of = "critic", .phase = 1});
    add(graph, "painter_loss", "passes_for_real", {.phase = 1});
    graph.chain({"noise", "painter"});
    graph.chain({"real", "critic"});
    graph.edge("painter", "of_fake", {.gradients = false});
    graph.edge("critic", "critic_loss.real");
    graph.edge("of_fake", "critic_loss.fake");
    graph.chain({"painter", "judge", "painter_loss"});
    return graph;
  };
  auto copied = make("cpu:4");
  copied.data_parallel(
      "copies", {.nodes = {"painter", "critic", "of_fake", "critic_loss", "judge", "painter_loss"},
                 .devices = {{0, 1, 1, 1, 1, 1}, {2, 3, 3, 3, 3, 3}}});
  expect_equal_training(make("cpu"), copied, {"painter", "critic"}, 12);
}

// Losses within the copies and after them, and of weights that somebody outside trains too.
TEST(Copies, OfSomeWithTheirLossesLearnWhatOneDoes) {
  const auto make = [](const std::string& devices) {
    auto graph = graph_on(devices);
    add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
    add(graph, "below", "mlp:2,8", {.role = Role::Train});
    graph.edge("data.x", "below");
    for (const std::string name : {"ann", "bob", "shadow"}) {
      const bool shares = name == "shadow";
      add(graph, name, "mlp:8,3", {.role = Role::Train, .weights_of = shares ? "ann" : ""},
          shares ? "ann" : name);
      add(graph, name + "_loss", "cross_entropy");
      graph.edge("below", name), graph.edge(name, name + "_loss.x");
      graph.edge("data.label", name + "_loss.label");
    }
    return graph;
  };
  auto copied = make("cpu:2");
  copied.data_parallel("copies",
                       {.nodes = {"ann", "ann_loss", "bob"}, .devices = {{0, 0, 0}, {1, 1, 1}}});
  expect_equal_training(make("cpu"), copied, {"ann", "bob"}, 12);
  Executor alone(compile(make("cpu"))), together(compile(copied));
  alone.run(12), together.run(12);
  for (size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(alone.weights("below")[i].allclose(together.weights("below")[i], kClose, kClose));
}

TEST(Copies, OfALearnerGiveTheirWeightsToOthers) {
  const auto make = [](const std::string& devices) {
    auto graph = students(devices);
    add(graph, "actor", "mlp:2,16,3", {.device = 0});
    graph.edge("data.x", "actor");
    graph.broadcast_weights("ann", {"actor"}, 3);
    return graph;
  };
  auto copied = make("cpu:4");
  copied.data_parallel("copies", {.nodes = {"ann", "bob", "ann_loss", "bob_loss"},
                                  .devices = {{0, 1, 0, 1}, {2, 3, 2, 3}}});
  Executor alone(compile(make("cpu"))), together(compile(copied));
  alone.run(7), together.run(7);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(alone.weights("actor")[i].allclose(together.weights("actor")[i], kClose, kClose));
    EXPECT_FALSE(together.weights("actor")[i].equal(together.weights("ann")[i]));
  }
}

TEST(Copies, WhatCannotBeCopiedIsNamed) {
  const auto split = [](Graph graph, std::vector<std::string> nodes) {
    return error_of([&] {
      std::vector<std::vector<int>> devices(2, std::vector<int>(nodes.size(), 0));
      graph.data_parallel("copies", {.nodes = nodes, .devices = devices});
      compile(graph);
    });
  };
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[n]", {});
  graph.node("more", plus(3)), graph.node("enough", plus(-10)), graph.node("last", plus(1));
  graph.chain({"x", "more", "enough"});
  graph.edge("more", "last");
  graph.loop(
      "grow",
      {.nodes = {"more", "enough"}, .carry = {{"more", "more"}}, .until = "enough", .most = 100});
  graph.output("y", "last");
  EXPECT_EQ(split(graph, {"enough"}),
            "'copies': node 'enough' decides for 'grow', and there is one of it for each copy; "
            "list all nodes of 'grow' too");
  EXPECT_EQ(split(graph, {"more", "last"}),
            "'copies': node 'last' is in another loop, branch or arm than 'more'; copies are made "
            "of all nodes of a loop or branch, or of some that stand side by side in it");
  EXPECT_EQ(split(graph, {"more", "enough", "last"}), "no error");

  for (const auto& nodes : {std::vector<std::string>{"more", "y"}, {"y", "more"}, {"more", "x"}})
    EXPECT_TRUE(has(split(graph, nodes), "cannot be copied: its rows come by an input and leave"));

  const EdgeOptions stale{.staleness = 1, .initial_shape = {33, 3}};
  EXPECT_EQ(split(students("cpu", stale), {"ann", "bob", "ann_loss", "bob_loss"}),
            "'copies': initial_shape of the edge to 'talk-ann_loss' has 33 rows, which 2 copies do "
            "not share evenly");
  auto trading = students("cpu");
  trading.exchange({.name = "trade"}, {"ann", "bob"});
  EXPECT_TRUE(has(split(trading, {"ann", "ann_loss"}),
                  "name all nodes of the exchange in one data_parallel, or none of them"));
  trading.node("own", plus(1), {.replicas = {0, 1}});
  EXPECT_EQ(split(trading, {"own"}),
            "'copies': node 'own' has replicas of its own; take one of the two");
  add(trading, "shadow", "mlp:2,16,3", {.role = Role::Train, .weights_of = "ann"});
  EXPECT_EQ(split(trading, {"shadow"}),
            "'copies': node 'shadow' is trained with the weights of 'ann', which is not copied; "
            "name that too");
}

}  // namespace
}  // namespace yoke::flow
