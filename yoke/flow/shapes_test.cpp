// SPDX-License-Identifier: Apache-2.0
// What is known of values on one side of a pattern is known on the other.
#include "yoke/flow/shapes.h"

#include <gtest/gtest.h>

#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

using Build = std::function<void(Graph&)>;

// Of compile and check together, as `yoke flow check` tells.
std::string verdict(const Build& build) {
  auto graph = graph_on("cpu:2");
  return error_of([&] {
    build(graph);
    check(compile(graph));
  });
}
void expect_refused(const Build& build, const std::vector<std::string>& words) {
  const auto text = verdict(build);
  for (const auto& word : words)
    EXPECT_TRUE(has(text, word)) << "wanted '" << word << "', got: " << text;
}
void expect_valid(const Build& build) { EXPECT_EQ(verdict(build), "no error"); }

// A node that gives this, and one that takes it.
void gives(Graph& graph, const std::string& name, const std::string& port) {
  graph.node(name, counts(), {.outputs = {port}});
}
void takes(Graph& graph, const std::string& name, const std::string& port) {
  graph.node(name, plus(0), {.inputs = {port}});
}

Build merged(const std::string& how, const std::vector<std::string>& given,
             const std::string& taken = "x") {
  return [=](Graph& graph) {
    std::vector<std::string> names;
    for (size_t i = 0; i < given.size(); ++i) {
      names.push_back(std::string(1, char('a' + i)));
      gives(graph, names.back(), given[i]);
    }
    graph.ensemble("mix", "",
                   {.nodes = names, .merge = how, .weights = std::vector(names.size(), 0.5)});
    takes(graph, "after", taken);
    graph.edge("mix", "after");
  };
}

TEST(FlowShapes, WhatIsMergedIsOfOneShape) {
  for (const char* how : {"mean", "weighted", "stack", "concat"}) {
    expect_refused(merged(how, {"y:FP32[b,3]", "y:FP32[b,4]"}),
                   {"'a.y -> mix.x0' gives FP32[a.b,3]", "'b.y -> mix.x1' gives FP32[b.b,4]",
                    cat(how, " wants values of one shape"), "3 is not 4"});
    expect_refused(merged(how, {"y:FP32[b,3]", "y:FP32[b,3]", "y:FP32[b,3,1]"}),
                   {"'c.y -> mix.x2'", "the other"});
    expect_valid(merged(how, {"y:FP32[b,3]", "y:FP32[n,3]"}));
    expect_valid(merged(how, {"y:FP32[b,3]", "y"}, "x:INT64[7]"));  // what is open stays open
  }
  expect_refused(merged("mean", {"y:FP32[2,3]", "y:FP32[3,3]"}), {"2 is not 3"});
  expect_valid(merged("concat", {"y:FP32[2,3]", "y:FP32[3,3]"}));
  expect_valid(merged("vote", {"y:FP32[b,3]", "y:FP32[b,4]", "y:INT64[b]"}));
  expect_refused(merged("vote", {"y:FP32[2,3]", "y:INT64[3]"}), {"'b.y -> mix.x1'", "2 is not 3"});
  expect_refused(merged("mean", {"y:INT64[b]", "y:INT64[b]"}),
                 {"'a.y -> mix.x0' gives INT64[a.b]", "a mean is of numbers in floating point"});
}

TEST(FlowShapes, WhatAMergeGivesIsComparedWithWhatIsTaken) {
  struct Case {
    std::string how;
    std::vector<std::string> given;
    std::string right, wrong;
  };
  const std::vector<Case> cases{
      {"mean", {"y:FP32[b,3]", "y:FP32[b,3]"}, "x:FP32[n,3]", "x:FP32[n,4]"},
      {"mean", {"y:FP32[b]", "y:FP64[b]"}, "x:FP64[n]", "x:FP32[n]"},
      {"weighted", {"y:FP32[b,3]", "y:INT64[b,3]"}, "x:FP32[n,3]", "x:INT64[n,3]"},
      {"stack", {"y:FP32[b,3]", "y:FP32[b,3]"}, "x:FP32[2,n,3]", "x:FP32[3,n,3]"},
      {"vote", {"y:FP32[b,3]", "y:FP32[b,4]"}, "x:INT64[n]", "x:FP32[n]"},
      {"vote", {"y:FP32[5,3]", "y:INT64[5]"}, "x:INT64[5]", "x:INT64[6]"},
      {"concat", {"y:FP32[2,3]", "y:FP32[4,3]"}, "x:FP32[6,3]", "x:FP32[5,3]"},
      {"concat", {"y:FP32[2,3]", "y:FP32[1..4,3]"}, "x:FP32[6,3]", "x:FP32[7,3]"}};
  for (const auto& [how, given, right, wrong] : cases) {
    expect_valid(merged(how, given, right));
    expect_refused(merged(how, given, wrong), {"'mix.y -> after.x'", "rule shapes"});
  }
}

// The rows of both come from inputs of the flow, by name.
TEST(FlowShapes, NamedSizesAgreeAcrossAMerge) {
  const auto flow = [](const std::string& how, int rows) -> Build {
    return [=](Graph& graph) {
      graph.input("p:FP32[2,4]", {}), graph.input(cat("q:FP32[", rows, ",4]"), {});
      for (const char* name : {"a", "b"})
        graph.node(name, plus(0), {.inputs = {"x:FP32[n,4]"}, .outputs = {"y:FP32[n,3]"}});
      graph.edge("p", "a"), graph.edge("q", "b");
      graph.ensemble("mix", "", {.nodes = {"a", "b"}, .merge = how});
      graph.output("y", "mix");
    };
  };
  expect_valid(flow("mean", 2));
  expect_refused(flow("mean", 3), {"rule shapes", "b.y -> mix.x1"});
  expect_valid(flow("concat", 3));
}

Build copied(const std::string& given, const std::string& taken, const std::string& after) {
  return [=](Graph& graph) {
    graph.input(given, {});
    graph.node("net", plus(0), {.inputs = {taken}, .outputs = {"y:FP32[n,3]"}});
    graph.edge("x", "net");
    takes(graph, "after", after);
    graph.edge("net", "after");
    graph.data_parallel("copies", {.nodes = {"net"}, .devices = {{0}, {1}}});
  };
}

TEST(FlowShapes, CopiesTakeAndGiveWhatTheWholeDoes) {
  expect_valid(copied("x:FP32[b,4]", "x:FP32[n,4]", "x:FP32[b,3]"));
  expect_refused(copied("x:FP32[b,5]", "x:FP32[n,4]", "x"), {"'copies-split.y0 -> net.x'"});
  expect_refused(copied("x:FP32[b,4]", "x:FP32[n,4]", "x:FP32[b,2]"), {"'copies.y -> after.x'"});
  expect_valid(copied("x:FP32[8,4]", "x:FP32[4,4]", "x"));
  expect_valid(copied("x:FP32[7,4]", "x:FP32[3..4,4]", "x"));
  expect_refused(copied("x:FP32[7,4]", "x:FP32[4,4]", "x"), {"'copies-split.y1 -> net@1.x'"});
  expect_refused(copied("x:FP32[1,4]", "x:FP32[n,4]", "x"),
                 {"'x.x -> copies-split.x' gives FP32[1,4]", "cannot be cut into 2 pieces"});
}

Build branched(const std::string& large, const std::string& small, const std::string& after) {
  return [=](Graph& graph) {
    gives(graph, "data", "y"), takes(graph, "when", "x");
    for (const auto& [name, port] : {std::pair("large", large), std::pair("small", small)})
      graph.node(name, plus(0), {.inputs = {"x"}, .outputs = {port}});
    for (const char* name : {"when", "large", "small"}) graph.edge("data", name);
    graph.branch("pick", {.when = "when",
                          .then = {"large"},
                          .otherwise = {"small"},
                          .then_gives = "large",
                          .otherwise_gives = "small"});
    takes(graph, "after", after);
    graph.edge("pick", "after");
  };
}

TEST(FlowShapes, EitherArmOfABranchSuitsWhoTakesIt) {
  expect_valid(branched("y:FP32[n,3]", "y:FP32[n,3]", "x:FP32[m,3]"));
  expect_valid(branched("y:FP32[n,3]", "y:FP32[n,4]", "x:FP32[m,k]"));
  expect_valid(branched("y:FP32[n,3]", "y:INT64[n]", "x"));
  expect_refused(branched("y:FP32[n,3]", "y:FP32[n,4]", "x:FP32[m,3]"),
                 {"'small.y -> pick-else.x' gives FP32[small.n,4]", "'after.x'", "size 1"});
  expect_refused(branched("y:FP32[n,4]", "y", "x:FP32[m,3]"), {"'large.y -> pick.x'", "'after.x'"});
  expect_refused(branched("y:FP32[n,3]", "y:INT64[n,3]", "x:FP32[m,3]"), {"INT64 is not FP32"});
}

TEST(FlowShapes, AGraphWithinAGraphIsSeenThrough) {
  const auto flow = [](const std::string& given, const std::string& taken,
                       const std::string& ports) -> Build {
    return [=](Graph& graph) {
      auto inner = graph_on("cpu:2");
      inner.input("in" + ports, {});
      inner.node("net", plus(0), {.inputs = {"x:FP32[n,4]"}, .outputs = {"y:FP32[n,3]"}});
      inner.edge("in", "net");
      inner.output("out", "net");
      gives(graph, "before", given), takes(graph, "after", taken);
      graph.subgraph("part", inner);
      graph.edge("before", "part.in"), graph.edge("part.out", "after");
    };
  };
  for (const char* ports : {"", ":FP32[m,4]"}) {
    expect_valid(flow("y:FP32[b,4]", "x:FP32[b,3]", ports));
    expect_refused(flow("y:FP32[b,4]", "x:FP32[b,2]", ports), {"'part/out.y -> after.x'"});
  }
  expect_refused(flow("y:FP32[b,5]", "x", ""), {"'part/in.in -> part/net.x'"});
  expect_refused(flow("y:FP32[b,5]", "x", ":FP32[m,4]"), {"'before.y -> part/in.x'"});
}

// What is now declared is also looked at when values come: it must hold of all that are right.
TEST(FlowShapes, ValuesPassThroughPatternsAsBefore) {
  auto inner = graph_on("cpu:2");
  inner.input("in", {});
  for (const double by : {1, 2, 3})
    inner.node(cat("n", by), plus(by), {.inputs = {"x:FP32[n,2]"}, .outputs = {"y:FP32[n,2]"}});
  inner.ensemble("mean", "in", {.nodes = {"n1", "n2", "n3"}});
  inner.ensemble("rows", "", {.nodes = {"n1", "n2"}, .merge = "concat"});
  inner.ensemble("votes", "", {.nodes = {"n1", "n2", "n3"}, .merge = "vote"});
  inner.ensemble("stack", "", {.nodes = {"n1", "n2"}, .merge = "stack"});
  for (const char* name : {"mean", "rows", "votes", "stack"}) inner.output(cat("out_", name), name);
  auto graph = graph_on("cpu:2");
  graph.input("x:FP32[b,2]", {});
  graph.node("net", plus(1),
             {.replicas = {0, 1}, .inputs = {"x:FP32[n,2]"}, .outputs = {"y:FP32[n,2]"}});
  graph.subgraph("part", inner);
  graph.edge("x", "net"), graph.edge("net", "part.in");
  for (const char* name : {"mean", "rows", "votes", "stack"})
    graph.output(name, cat("part.out_", name));
  Executor executor(compile(graph));
  for (const int64_t rows : {5, 2, 8}) {
    const auto out = executor.step({at::zeros({rows, 2})});
    EXPECT_EQ(out[0].sizes(), (std::vector<int64_t>{rows, 2}));
    EXPECT_EQ(number(out[0]), 3);
    EXPECT_EQ(out[1].sizes(), (std::vector<int64_t>{2 * rows, 2}));
    EXPECT_EQ(out[2].sizes(), (std::vector<int64_t>{rows}));
    EXPECT_EQ(out[3].sizes(), (std::vector<int64_t>{2, rows, 2}));
  }
  const auto ports = executor.output_ports();
  EXPECT_EQ(ports[0].wanted(), "FP32[-1,2]");
  EXPECT_EQ(ports[1].wanted(), "FP32[-1,2]");
  EXPECT_EQ(ports[2].wanted(), "INT64[-1]");
  EXPECT_EQ(ports[3].wanted(), "FP32[2,-1,2]");
}

// Two values of one node, of different rounds: their rows have one name, and may differ.
TEST(FlowShapes, RowsThatAreJoinedMayDiffer) {
  auto graph = graph_on("cpu");
  graph.node("a", function(Function([](const Tensors&, int64_t firing) -> Tensors {
               return {at::zeros({firing + 1, 2})};
             })),
             {.outputs = {"y:FP32[n,2]"}});
  auto inner = graph_on("cpu");
  inner.input("x", {});
  inner.output("y", "x");
  for (const char* name : {"now", "before"}) graph.subgraph(name, inner);
  graph.edge("a", "now.x");
  graph.edge("a", "before.x", {.staleness = 1, .initial_shape = {3, 2}});
  graph.ensemble("mix", "", {.nodes = {"now.y", "before.y"}, .merge = "concat"});
  graph.output("y", "mix");
  Executor executor(compile(graph));
  for (const int64_t rows : {1 + 3, 2 + 1, 3 + 2}) EXPECT_EQ(executor.step({})[0].size(0), rows);
}

}  // namespace
}  // namespace yoke::flow
