// SPDX-License-Identifier: Apache-2.0
// `yoke flow bench peers`: four small models as a chain and as an ensemble, next to
// bench/peers/flow.py, whose models, inputs and outputs are the same.
#include <ATen/Functions.h>

#include <algorithm>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/flow_bench.h"
#include "yoke/cli/scratch.h"

namespace yoke::cli {
namespace {

constexpr int kModels = 4, kInputs = 4, kUnderWay = 64;
constexpr int64_t kBatch = 8, kDim = 64;

at::Tensor sines(int64_t count, double times, double plus) {
  return at::arange(count, at::kDouble).mul_(times).add_(plus).sin_();
}

flow::Open model(int index) {
  const auto weight = [&](int layer) {
    return (sines(kDim * kDim, index + 1, layer) / 8).to(at::kFloat).view({kDim, kDim});
  };
  const auto bias = sines(kDim, 1, index).to(at::kFloat);
  return flow::function([first = weight(0), second = weight(1), bias](const flow::Tensors& in) {
    return at::linear(at::tanh(at::linear(in[0], first, bias)), second, bias);
  });
}

flow::Graph graph_of(const std::string& what) {
  auto graph = flow_on(topo::Device{}, kModels);
  std::vector<std::string> names;
  for (int i = 0; i < kModels; ++i) {
    names.push_back(cat("m", i));
    graph.node(names.back(), model(i), {.device = i});
  }
  const flow::EdgeOptions edge{.capacity = 32};
  graph.input(cat("in:FP32[b,", kDim, "]"), {}, 0);
  if (what == "chain") {
    graph.edge("in", names.front());
    graph.chain(names, edge);
  } else {
    // Not where the input is: that rank would wait for the mean before it takes the next round.
    graph.ensemble("mean", "in", {.nodes = names, .device = kModels - 1, .edge = edge});
  }
  graph.output("out", what == "chain" ? names.back() : "mean");
  return graph;
}

FlowOptions options_of(const std::string& what) {
  FlowOptions options{.under_way = kUnderWay, .tolerance = 1e-4};
  for (int k = 0; k < kInputs; ++k) {
    const auto x = sines(kBatch * kDim, 1, k).to(at::kFloat).view({kBatch, kDim});
    auto y = x;
    flow::Tensors all;
    for (int i = 0; i < kModels; ++i) {
      const auto body = model(i)(at::kCPU);
      all.push_back(body.run({x}, 0)[0]);
      y = body.run({y}, 0)[0];
    }
    options.inputs.push_back(x);
    options.wanted.push_back(what == "chain" ? y : at::stack(all).mean(0));
  }
  return options;
}

}  // namespace

void bench_flow_peers(BenchTable& bench) {
  if (bench.peers.empty()) return;
  const std::vector<std::pair<std::string, std::string>> ways{
      {"chain", "chain of 4, of isend and irecv in Python"},
      {"ensemble", "ensemble of 4, of all_gather in Python"},
      {"ensemble-sent", "ensemble of 4, of isend and irecv in Python"}};
  for (const auto& [way, what] : ways) {
    const auto options = options_of(way);
    const Scratch scratch;
    const auto expect = scratch.path() / "outputs";
    std::ofstream file(expect, std::ios::binary);
    for (const auto& output : options.wanted)
      file.write(static_cast<const char*>(output.contiguous().const_data_ptr()),
                 std::streamsize(output.nbytes()));
    if (!file.flush()) fail(Kind::Io, "cannot write ", expect.string());
    std::unique_ptr<Trainer> peer;
    try {
      peer = make_peer("flow.py", {"--what", way, "--expect", expect.string()});
    } catch (const Error& error) {
      bench.skip("peers", what, error.what());
      continue;
    }
    const Turns turns(
        {"yoke", "python"},
        [&](const std::string& name) -> std::unique_ptr<Trainer> {
          if (name == "python") return std::move(peer);
          return std::make_unique<FlowRounds>(graph_of(way), options);
        },
        num_turns(bench), 0, "peers " + way);
    bench.report(
        {.bench = "peers",
         .what = what,
         .unit = "x",
         .got = turns.ratio(0, 1),
         .least = 3,
         .more = {{"rounds_per_s", 1e3 / turns.ms(0)}, {"python_per_s", 1e3 / turns.ms(1)}}});
  }
}

}  // namespace yoke::cli
