// SPDX-License-Identifier: Apache-2.0
// Two models on two devices that answer together: a module and a function, their mean, and the
// proof that they cannot wait for each other for ever. `yoke flow` does the same from a TOML file.
#include <torch/nn.h>

#include <iostream>

#include "yoke/yoke.h"

namespace flow = yoke::flow;

int main() {
  flow::Graph graph({.name = "pair", .devices = yoke::topo::parse_devices("cpu:2")});
  graph.node("learned", flow::module([] {
               torch::manual_seed(1);
               return torch::nn::Linear(2, 1);
             }),
             {.device = 0, .inputs = {"x:FP32[b,2]"}, .outputs = {"y:FP32[b,1]"}});
  graph.node("known", flow::function([](const flow::Tensors& in) { return in[0].sum(1, true); }),
             {.device = 1, .inputs = {"x:FP32[b,2]"}, .outputs = {"y:FP32[b,1]"}});
  graph.ensemble("both", "", {.nodes = {"learned", "known"}, .merge = "mean"});
  graph.input("x:FP32[b,2]", {"learned", "known"});
  graph.output("y:FP32[b,1]", "both");

  auto compiled = flow::compile(graph);
  flow::check(compiled);  // throws with the circle, if there is one
  std::cout << compiled.placement() << compiled.verdict() << "\n";

  flow::Executor executor(std::move(compiled));
  // Rounds follow each other closely: the second enters while the first is under way.
  executor.submit({torch::tensor({{1.F, 2.F}})});
  executor.submit({torch::tensor({{3.F, 4.F}, {5.F, 6.F}})});
  for (int round = 0; round < 2; ++round) std::cout << executor.collect()[0] << "\n";
  std::cout << executor.report().bottleneck() << "\n";

  // Two that wait for each other are refused, with names.
  flow::Graph knot({.devices = yoke::topo::parse_devices("cpu:2")});
  const auto same = flow::function([](const flow::Tensors& in) { return in[0]; });
  knot.node("ann", same, {.device = 0});
  knot.node("bob", same, {.device = 1});
  knot.edge("ann", "bob");
  knot.edge("bob", "ann");
  try {
    flow::check(flow::compile(knot));
  } catch (const yoke::Error& error) {
    std::cout << error.what();
  }
}
