// SPDX-License-Identifier: Apache-2.0
// Random graphs: several queues, each as late as chance has it, compute what one alone does.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <numeric>
#include <thread>

#include "yoke/base/rng.h"
#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

constexpr int64_t kRows = 6;  // that ports cut and join, as 1, 2 or 3 values

struct Draw {
  Rng rng;
  uint64_t count = 0;
  int64_t operator()(int64_t below) { return int64_t(rng.below(count++, uint64_t(below))); }
  bool chance(int64_t of) { return (*this)(of) == 0; }
};

// Another value, another order of values or another firing gives something else.
Open mixes(int64_t key, size_t outputs) {
  return function(Function([=](const Tensors& in, int64_t firing) {
    auto sum = at::full({}, double(key + firing % 7));
    for (const auto& value : in) {
      const auto row = value.cpu().reshape({-1});
      sum = (sum * 1.25 + at::dot(row, at::arange(1, row.numel() + 1, at::kFloat))).remainder(97);
    }
    Tensors given;
    for (size_t i = 0; i < outputs; ++i)
      given.push_back(at::arange(kRows, at::kFloat) + sum * double(i + 1));
    return given;
  }));
}

struct Flow {
  Graph graph;
  std::shared_ptr<std::map<std::string, Tensors>> seen;  // by node, in the order of its firings
};

Flow random_flow(uint64_t seed, bool several) {
  Draw draw{Rng(seed, "flow")};
  Flow flow{graph_on(several ? "cpu:3" : "cpu"),
            std::make_shared<std::map<std::string, Tensors>>()};
  auto& graph = flow.graph;
  const auto anywhere = [&] {
    const int at = int(draw(3));
    return several ? at : 0;
  };
  const auto options = [&](int64_t least_staleness, int64_t least_capacity, int64_t a_round) {
    const std::array ways{Transport::Auto, Transport::Copy, Transport::Host, Transport::Send};
    EdgeOptions edge{.transport = ways[size_t(draw(4))],
                     .staleness = std::max(least_staleness, draw.chance(3) ? 1 + draw(2) : 0),
                     .initial = double(draw(9)),
                     .initial_shape = {kRows},
                     .every = draw.chance(4) ? 2 + draw(2) : 1};
    if (draw.chance(2)) edge.capacity = least_capacity + edge.staleness * a_round + draw(3);
    return edge;
  };
  const auto see = [&](const std::string& from) {
    auto* const list = &(*flow.seen)[from];
    graph.node("see-" + from, function([list](const Tensors& in) {
                 list->push_back(in[0].cpu());
                 return in[0];
               }),
               {.device = anywhere()});
    graph.edge(from, "see-" + from);
  };

  struct Link {
    size_t from, to;
    bool back;
  };
  const auto count = size_t(3 + draw(5));
  std::vector<int64_t> firings{1};
  std::vector<Link> links;
  for (size_t to = 1; to < count; ++to) {
    firings.push_back(1 + draw(3));
    for (int64_t i = draw(3); i >= 0; --i) {
      const bool back = draw.chance(4);
      links.push_back({size_t(draw(int64_t(back ? count : to))), to, back});
    }
  }
  const auto tokens = [&](const Link& link, bool gives) {
    const int64_t from = firings[link.from], to = firings[link.to];
    return std::lcm(from, to) / (gives ? from : to);
  };
  for (size_t i = 0; i < count; ++i) {
    NodeOptions node{.device = anywhere(), .outputs = {"y"}};
    for (size_t k = 0; k < links.size(); ++k) {
      if (links[k].to == i) node.inputs.push_back(cat(tokens(links[k], false), "*x", k));
      if (links[k].from == i) node.outputs.push_back(cat(tokens(links[k], true), "*y", k));
    }
    graph.node(cat("n", i), mixes(int64_t(i), node.outputs.size()), node);
  }
  for (size_t k = 0; k < links.size(); ++k) {
    const int64_t given = tokens(links[k], true), taken = tokens(links[k], false);
    graph.edge(cat("n", links[k].from, ".y", k), cat("n", links[k].to, ".x", k),
               options(links[k].back, std::max(given, taken), given * firings[links[k].from]));
  }
  for (size_t i = 0; i < count; ++i) see(cat("n", i));

  const auto pair = [&](const std::string& name, const auto& add) {
    for (const int i : {0, 1}) add(cat(name, i), NodeOptions{.device = anywhere()});
    return std::vector<std::string>{cat(name, 0), cat(name, 1)};
  };
  const auto mixer = [&](const std::string& name, const NodeOptions& node) {
    graph.node(name, mixes(int64_t(name.size()), 1), node);
  };
  if (draw.chance(2)) {
    graph.ensemble("mix", "n0",
                   {.nodes = pair("member", mixer),
                    .merge = draw.chance(2) ? "mean" : "stack",
                    .device = anywhere(),
                    .edge = options(0, 1, 1)});
    see("mix");
  }
  if (draw.chance(2)) {
    const auto from = pair("says", mixer), into = pair("hears", mixer);
    for (const auto& name : from) graph.edge("n0", name);
    graph.exchange("talk",
                   {.from = from, .into = into, .ring = draw.chance(2), .edge = options(0, 1, 1)});
    for (const auto& name : into) see(name);
  }
  if (draw.chance(2)) {
    const auto models = pair("model", [&](const std::string& name, const NodeOptions& node) {
      flow::add(graph, name, "mlp:6,6", node);
    });
    for (const auto& name : models) graph.edge("n0", name), see(name);
    graph.exchange(
        {.name = "average", .ring = draw.chance(2), .every = 1 + draw(2), .staleness = draw(2)},
        models);
  }
  return flow;
}

TEST(RandomFlows, SeveralQueuesComputeWhatOneDoes) {
  int ran = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto one = random_flow(seed, false), several = random_flow(seed, true);
    auto alone = compile(one.graph), together = compile(several.graph);
    // An edge may hold too little for an order of the other.
    if (alone.knot({.suggest = false}) || together.knot({.suggest = false})) continue;
    ++ran;
    Executor first(std::move(alone));
    Executor second(std::move(together),
                    {.before = [&, calls = std::make_shared<std::atomic<uint64_t>>()](
                                   int queue, const plan::Operation&) {
                      const Rng rng(seed, "delays", uint64_t(queue));
                      const auto late = rng.below((*calls)++, 400);
                      if (late < 100) std::this_thread::sleep_for(std::chrono::microseconds(late));
                    }});
    for (const int64_t rounds : {5, 2}) first.run(rounds), second.run(rounds);
    for (const auto& [node, values] : *one.seen) {
      const auto& others = several.seen->at(node);
      ASSERT_EQ(values.size(), others.size()) << "seed " << seed << ", " << node;
      for (size_t i = 0; i < values.size(); ++i)
        ASSERT_TRUE(values[i].equal(others[i]))
            << "seed " << seed << ", " << node << ", firing " << i << "\n"
            << values[i] << "\n"
            << others[i] << "\n"
            << plan::to_text(second.compiled().program);
    }
  }
  EXPECT_GT(ran, 150) << "of 200";
}

}  // namespace
}  // namespace yoke::flow
