// SPDX-License-Identifier: Apache-2.0
// Graphs that cannot be, each refused before anything runs with what to do.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

std::string refusal(const std::function<void(Graph&)>& build, const std::string& devices = "cpu:2",
                    Kind kind = Kind::Config) {
  auto graph = graph_on(devices);
  try {
    build(graph);
    compile(graph);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "no error";
}

void expect_refusal(const std::string& words, const std::function<void(Graph&)>& build) {
  const std::string text = refusal(build);
  EXPECT_TRUE(has(text, words)) << "wanted '" << words << "', got: " << text;
}

void add_one(Graph& graph, const std::string& name, NodeOptions options = {}) {
  graph.node(name, plus(1), std::move(options));
}

TEST(Refusals, InputsAndOutputsAreOneValueARound) {
  expect_refusal("'y' is an output of the flow, one value a round", [](Graph& graph) {
    graph.input("x", {});
    add_one(graph, "two", {.inputs = {"x"}, .outputs = {"2*y"}});
    graph.edge("x", "two");
    graph.output("y", "two");
  });
  expect_refusal("'x' is an input of the flow, one value a round", [](Graph& graph) {
    graph.input("x", {});
    add_one(graph, "two", {.inputs = {"2*x"}});
    graph.edge("x", "two");
  });
  expect_refusal("'x' is an input of the flow, one value a round", [](Graph& graph) {
    graph.input("x", {});
    for (const char* name : {"when", "a", "b"}) add_one(graph, name);
    graph.node("data", counts(), {.outputs = {"y"}});
    graph.edge("data", "when"), graph.edge("x", "a"), graph.edge("data", "b");
    graph.branch("pick", {.when = "when",
                          .then = {"x", "a"},
                          .otherwise = {"b"},
                          .then_gives = "a",
                          .otherwise_gives = "b"});
  });
}

TEST(Refusals, CopiesHaveInputsAndDevicesThatAreThere) {
  expect_refusal("node 'data' cannot be copied", [](Graph& graph) {
    graph.node("data", counts(), {.replicas = {0, 1}, .outputs = {"y"}});
  });
  expect_refusal("device 9, and the flow has 2", [](Graph& graph) {
    graph.node("data", counts(), {.outputs = {"y"}});
    add_one(graph, "a"), add_one(graph, "b");
    graph.edge("data", "a");
    graph.data_parallel("both", {.nodes = {"a", "b"}, .devices = {{0, 9}, {1, 1}}});
  });
  expect_refusal("'net' is one of several copies", [](Graph& graph) {
    add(graph, "data", "spirals");
    add(graph, "net", "mlp:2,3", {.replicas = {0, 1}});
    add(graph, "other", "mlp:2,3");
    graph.edge("data.x", "net"), graph.edge("data.x", "other");
    graph.exchange({.name = "trade"}, {"net", "other"});
  });
}

TEST(Refusals, APatternsPartsAreOfOnePhase) {
  expect_refusal("has nodes of phases 0 ('a') and 1 ('b')", [](Graph& graph) {
    graph.node("data", counts(), {.outputs = {"y"}});
    add_one(graph, "a"), add_one(graph, "b", {.phase = 1});
    graph.edge("data", "a"), graph.edge("a", "b");
    graph.loop("again", {.nodes = {"a", "b"}, .most = 2});
  });
  expect_refusal("gradients are traded in one", [](Graph& graph) {
    add(graph, "data", "spirals");
    for (const int phase : {0, 1}) {
      add(graph, cat("net", phase), "mlp:2,3", {.role = Role::Train, .phase = phase});
      add(graph, cat("loss", phase), "cross_entropy", {.phase = phase});
      graph.edge("data.x", cat("net", phase));
      graph.edge(cat("net", phase), cat("loss", phase));
      graph.edge("data.label", cat("loss", phase, ".label"));
    }
    graph.exchange({.what = Exchange::What::Gradients, .name = "trade"}, {"net0", "net1"});
  });
}

TEST(Refusals, WeightsDoNotChangeBetweenAComputationAndItsWayBack) {
  expect_refusal("changes their weights; give it phase = 1", [](Graph& graph) {
    add(graph, "data", "spirals");
    add(graph, "front", "mlp:2,2", {.role = Role::Train});
    add(graph, "net", "mlp:2,3", {.role = Role::Train});
    add(graph, "loss", "cross_entropy");
    graph.edge("data.x", "front"), graph.edge("front", "net", {.gradients = false});
    graph.edge("net", "loss"), graph.edge("data.label", "loss.label");
    add(graph, "judge", "mlp:2,3", {.role = Role::Frozen, .weights_of = "net"});
    add(graph, "late", "cross_entropy", {.phase = 1});
    graph.edge("front", "judge"), graph.edge("judge", "late");
    graph.edge("data.label", "late.label");
  });
}

TEST(Refusals, EdgesDoNotMixWhatContradicts) {
  for (const EdgeOptions& options : {EdgeOptions{.policy = Policy::Latest, .every = 2},
                                     EdgeOptions{.policy = Policy::Drop, .staleness = 1}})
    expect_refusal("latest and drop leave it to chance", [&](Graph& graph) {
      add_one(graph, "a"), add_one(graph, "b");
      graph.edge("a", "b", options);
    });
  for (const EdgeOptions& options :
       {EdgeOptions{.capacity = int64_t(1) << 30}, EdgeOptions{.staleness = int64_t(1) << 30}})
    expect_refusal("to 65536", [&](Graph& graph) {
      add_one(graph, "a"), add_one(graph, "b");
      graph.edge("a", "b", options);
    });
  expect_refusal("no gradients cross an exchange", [](Graph& graph) {
    for (const char* name : {"a", "b"}) add_one(graph, name);
    graph.exchange("talk", {.from = {"a", "b"}, .into = {"a", "b"}, .edge = {.gradients = true}});
  });
  expect_refusal("into or out of a loop or branch; use auto", [](Graph& graph) {
    graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
    add_one(graph, "a", {.device = 1});
    graph.edge("data", "a", {.transport = Transport::Send});
    graph.loop("again", {.nodes = {"a"}, .most = 2});
  });
}

TEST(Refusals, ThePartsOfABranchAreItsOwn) {
  expect_refusal("take 'pick.y'", [](Graph& graph) {
    graph.node("data", counts(), {.outputs = {"y"}});
    for (const char* name : {"when", "a", "b", "after"}) add_one(graph, name);
    for (const char* name : {"when", "a", "b"}) graph.edge("data", name);
    graph.branch("pick", {.when = "when",
                          .then = {"a"},
                          .otherwise = {"b"},
                          .then_gives = "a",
                          .otherwise_gives = "b"});
    graph.edge("pick-else", "after");
  });
}

TEST(Refusals, WhatCountsRoundsIsOutsideOfLoopsAndBranches) {
  // x -> first -> second -> after, the two in the middle in a loop, or an arm each.
  const auto delayed = [](size_t place, EdgeOptions options) {
    return [=](Graph& graph) {
      const std::vector<std::string> names{"x", "first", "second", "after"};
      graph.node("x", counts(), {.outputs = {"y"}});
      for (size_t i = 1; i < names.size(); ++i) {
        add_one(graph, names[i]);
        graph.edge(names[i - 1], names[i], place == i ? options : EdgeOptions{});
      }
      graph.loop("again",
                 {.nodes = {"first", "second"}, .carry = {{"second", "first"}}, .most = 2});
    };
  };
  const EdgeOptions every{.every = 2}, stale{.staleness = 1, .initial_shape = {1}};
  for (const size_t place : {1, 2, 3})
    expect_refusal("every counts rounds, and loop 'again'", delayed(place, every));
  expect_refusal("staleness counts rounds, and loop 'again'", delayed(2, stale));
  for (const size_t place : {1, 3}) EXPECT_EQ(refusal(delayed(place, stale)), "no error") << place;

  const auto branched = [](bool leaves, EdgeOptions options) {
    return [=](Graph& graph) {
      graph.node("x", counts(), {.outputs = {"y"}});
      for (const char* name : {"when", "a", "more", "b", "after"}) add_one(graph, name);
      for (const char* name : {"when", "a", "b"}) graph.edge("x", name);
      graph.edge("a", "more", leaves ? EdgeOptions{} : options);
      graph.branch("pick", {.when = "when",
                            .then = {"a", "more"},
                            .otherwise = {"b"},
                            .then_gives = "more",
                            .otherwise_gives = "b"});
      graph.edge("pick", "after", leaves ? options : EdgeOptions{});
    };
  };
  expect_refusal("every counts rounds, and branch 'pick'", branched(true, every));
  expect_refusal("every counts rounds, and branch 'pick'", branched(false, every));
  expect_refusal("staleness counts rounds, and branch 'pick'", branched(false, stale));
  EXPECT_EQ(refusal(branched(true, stale)), "no error");
}

// The figure is what was free before anything was opened, and not less.
TEST(Refusals, WhatDoesNotFitIsRefusedByWhatWasFreeBefore) {
  const auto flow = [](uint64_t available) {
    auto host = std::make_shared<topo::Host>();
    host->available_memory_bytes = available;
    Graph graph({.devices = topo::parse_devices("cpu:2"), .host = host});
    add(graph, "data", "spirals");
    add(graph, "net", "mlp:2,1000,1000", {.device = 1});
    graph.edge("data.x", "net");
    return graph;
  };
  const uint64_t bytes = 4 * (2 * 1000 + 1000 + 1000 * 1000 + 1000);
  EXPECT_NO_THROW(compile(flow(bytes)));
  const auto text = error_of([&] { compile(flow(bytes - 1)); });
  EXPECT_TRUE(has(text, "need 3.83 MiB for their weights")) << text;
}

TEST(Refusals, FirstValuesAreOfTheShapeOfTheirPorts) {
  const auto delayed = [](const std::string& given, const std::string& taken,
                          std::vector<int64_t> shape) {
    return [=](Graph& graph) {
      graph.node("a", counts(), {.outputs = {given}});
      graph.node("b", plus(0), {.inputs = {taken}});
      graph.edge("a", "b", {.staleness = 1, .initial_shape = shape});
    };
  };
  expect_refusal("initial_shape is [4, 2], and port 'b.x' is FP32[b.n,3]",
                 delayed("y", "x:FP32[n,3]", {4, 2}));
  expect_refusal("initial_shape is [4], and port 'a.y' is FP32[a.n,3]",
                 delayed("y:FP32[n,3]", "x", {4}));
  EXPECT_EQ(refusal(delayed("y:FP32[n,3]", "x:FP32[m,3]", {4, 3})), "no error");
  EXPECT_EQ(refusal(delayed("y", "x", {4, 2})), "no error");
  // Beyond a merge too.
  expect_refusal(
      "'a.y -> mix.x0': initial_shape is [4, 2], and port 'mix.x0' is FP32[", [](Graph& graph) {
        for (const char* name : {"a", "b"})
          graph.node(name, counts(), {.outputs = {"y:FP32[n,3]"}});
        graph.ensemble("mix", "",
                       {.nodes = {"a", "b"}, .edge = {.staleness = 1, .initial_shape = {4, 2}}});
      });
}

TEST(Refusals, FirstValuesThatDoNotFitAreRefused) {
  const auto flow = [](int64_t staleness, std::vector<int64_t> shape) {
    auto host = std::make_shared<topo::Host>();
    host->available_memory_bytes = 40'000;
    Graph graph({.devices = topo::parse_devices("cpu:2"), .host = host});
    add_one(graph, "a"), add_one(graph, "b");
    graph.edge("a", "b", {.staleness = staleness, .initial_shape = shape});
    graph.node("data", counts(), {.outputs = {"y"}});
    graph.edge("data", "a");
    return graph;
  };
  EXPECT_NO_THROW(compile(flow(100, {10, 10})));  // of four bytes each
  const auto text = error_of([&] { compile(flow(101, {10, 10})); });
  EXPECT_TRUE(has(text, "edge 'a.y -> b.x' begins with 101 values of [10, 10]") &&
              has(text, "give it less staleness"))
      << text;
  EXPECT_TRUE(has(error_of([&] {
                    compile(flow(65536, {INT32_MAX, INT32_MAX, INT32_MAX}));
                  }),
                  "begins with 65536 values"));
}

TEST(Refusals, ASubgraphHasTheDevicesThatAreThere) {
  const auto part = [](std::vector<int> devices, const std::function<void(Graph&)>& more) {
    return [=](Graph& graph) {
      auto inner = graph_on("cpu:2");
      for (const char* name : {"a", "b"}) inner.node(name, counts(), {.outputs = {"y"}});
      more(inner);
      graph.node("data", counts(), {.device = 0, .outputs = {"y"}});
      graph.subgraph("part", inner, devices);
      if (devices == std::vector{1}) graph.colocate({"part/a", "data"});
    };
  };
  expect_refusal("'part': devices lists 2, and the flow has 2 (0 to 1)", part({2}, [](Graph&) {}));
  expect_refusal(
      "node 'data' is pinned to device 0, and what it must be together with is of a "
      "sub-graph on other devices",
      part({1}, [](Graph&) {}));
  expect_refusal("only 2 devices (0 for its sub-graph)", part({0}, [](Graph& inner) {
                   inner.separate({"a", "b"});
                 }));
}

}  // namespace
}  // namespace yoke::flow
