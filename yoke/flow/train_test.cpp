// SPDX-License-Identifier: Apache-2.0
// Training in a flow: the same as a loop on one device.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <deque>
#include <filesystem>
#include <thread>

#include "yoke/base/rng.h"
#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

struct Net {  // an mlp word, by hand
  Tensors weights;
  explicit Net(const std::string& text, const std::string& key)
      : weights(word(text, key)(at::kCPU).weights) {}
  at::Tensor operator()(at::Tensor x) const {
    for (size_t i = 0; i < weights.size(); i += 2) {
      x = at::linear(x, weights[i], weights[i + 1]);
      if (i + 2 < weights.size()) x = at::tanh(x);
    }
    return x;
  }
  void step(double lr) {
    const torch::NoGradGuard no_grad;
    for (auto& weight : weights) {
      if (!weight.grad().defined()) continue;
      weight.sub_(weight.grad() * lr);
      weight.mutable_grad().reset();
    }
  }
};

struct Batches {
  Function run = word("spirals:batch=32,points=200")(at::kCPU).run;
  Tensors operator()(int64_t round) const { return run({}, round); }
};

std::vector<double> train_by_hand(int64_t rounds, double lr) {
  Net front("mlp:2,16,16", "front"), back("mlp:16,16,3", "back");
  const Batches batches;
  std::vector<double> losses;
  for (int64_t i = 0; i < rounds; ++i) {
    const auto batch = batches(i);
    auto loss = at::cross_entropy_loss(back(front(batch[0])), batch[1]);
    losses.push_back(loss.item<double>());
    loss.backward();
    front.step(lr), back.step(lr);
  }
  return losses;
}

Graph chain_graph(const std::string& devices, int second, EdgeOptions edge) {
  auto graph = graph_on(devices);
  add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
  add(graph, "front", "mlp:2,16,16", {.device = 0, .role = Role::Train, .optimizer = {.lr = 0.3}});
  add(graph, "back", "mlp:16,16,3",
      {.device = second, .role = Role::Train, .optimizer = {.lr = 0.3}});
  add(graph, "loss", "cross_entropy", {.device = second});
  graph.edge("data.x", "front");
  graph.edge("front", "back", edge);
  graph.edge("back", "loss.x");
  graph.edge("data.label", "loss.label");
  return graph;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& wanted,
                 double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], wanted[i], tolerance) << "round " << i;
}

TEST(Flow, TrainingThroughAChainEqualsOneDeviceOverEveryTransport) {
  const auto wanted = train_by_hand(20, 0.3);
  EXPECT_LT(wanted.back(), wanted.front() * 0.9);
  for (const auto transport :
       {Transport::Auto, Transport::Alias, Transport::Copy, Transport::Send, Transport::Host}) {
    Executor executor(compile(chain_graph("cpu:2", 1, {.transport = transport})));
    executor.run(20);
    expect_near(executor.losses("loss"), wanted, kClose);
  }
  Executor one(compile(chain_graph("cpu", 0, {})));
  one.run(20);
  expect_near(one.losses("loss"), wanted, kClose);
}

TEST(Flow, AnEdgeWithoutGradientsStopsThem) {
  const std::string text = error_of([] { compile(chain_graph("cpu:2", 1, {.gradients = false})); });
  EXPECT_TRUE(has(text, "node 'front' is to be trained, and none of its edges leads to a loss"))
      << text;
}

TEST(Flow, MutualLearningEqualsOneDevice) {
  auto graph = graph_on("cpu:2");
  add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
  for (const std::string name : {"ann", "bob"}) {
    const int device = name == "bob";
    add(graph, name, "mlp:2,16,3",
        {.device = device, .role = Role::Train, .optimizer = {.lr = 0.2}});
    add(graph, name + "_loss", "mutual", {.device = device});
    graph.edge("data.x", name);
    graph.edge(name, name + "_loss.x");
    graph.edge("data.label", name + "_loss.label");
  }
  graph.exchange("talk", {.from = {"ann", "bob"}, .into = {"ann_loss.peers", "bob_loss.peers"}});
  Executor executor(compile(graph));
  executor.run(25);

  Net ann("mlp:2,16,3", "ann"), bob("mlp:2,16,3", "bob");
  const auto mutual = word("mutual")(at::kCPU).run;
  const Batches batches;
  std::vector<double> ann_losses, bob_losses;
  for (int64_t i = 0; i < 25; ++i) {
    const auto batch = batches(i);
    const auto a = ann(batch[0]), b = bob(batch[0]);
    auto a_loss = mutual({a, b.detach().unsqueeze(0), batch[1]}, 0)[0];
    auto b_loss = mutual({b, a.detach().unsqueeze(0), batch[1]}, 0)[0];
    ann_losses.push_back(a_loss.item<double>()), bob_losses.push_back(b_loss.item<double>());
    a_loss.backward(), b_loss.backward();
    ann.step(0.2), bob.step(0.2);
  }
  expect_near(executor.losses("ann_loss"), ann_losses, kClose);
  expect_near(executor.losses("bob_loss"), bob_losses, kClose);
}

TEST(Flow, AGanEqualsOneDevice) {
  auto graph = graph_on("cpu:2");
  const OptimizerOptions sgd{.lr = 0.05};
  add(graph, "noise", "noise:batch=16,dim=4", {.device = 0});
  add(graph, "painter", "mlp:4,8,2", {.device = 0, .role = Role::Train, .optimizer = sgd});
  add(graph, "real", "circle:batch=16", {.device = 1});
  add(graph, "critic", "mlp:2,8,1", {.device = 1, .role = Role::Train, .optimizer = sgd});
  add(graph, "of_fake", "mlp:2,8,1", {.role = Role::Train, .weights_of = "critic"});
  add(graph, "critic_loss", "tells_apart", {.device = 1});
  add(graph, "judge", "mlp:2,8,1", {.role = Role::Frozen, .weights_of = "critic", .phase = 1});
  add(graph, "painter_loss", "passes_for_real", {.device = 1, .phase = 1});
  graph.chain({"noise", "painter"});
  graph.chain({"real", "critic"});
  graph.edge("painter", "of_fake", {.gradients = false});
  graph.edge("critic", "critic_loss.real");
  graph.edge("of_fake", "critic_loss.fake");
  graph.chain({"painter", "judge", "painter_loss"});
  Executor executor(compile(graph));
  executor.run(20);

  Net painter("mlp:4,8,2", "painter"), critic("mlp:2,8,1", "critic");
  const auto noise = word("noise:batch=16,dim=4", "noise")(at::kCPU).run;
  const auto real = word("circle:batch=16", "real")(at::kCPU).run;
  std::vector<double> critic_losses, painter_losses;
  for (int64_t i = 0; i < 20; ++i) {
    const auto fake = painter(noise({}, i)[0]);
    auto loss =
        at::softplus(-critic(real({}, i)[0])).mean() + at::softplus(critic(fake.detach())).mean();
    critic_losses.push_back(loss.item<double>());
    loss.backward();
    critic.step(0.05);
    auto painted = at::softplus(-critic(fake)).mean();
    painter_losses.push_back(painted.item<double>());
    painted.backward();
    painter.step(0.05);
    for (auto& weight : critic.weights) weight.mutable_grad().reset();
  }
  expect_near(executor.losses("critic_loss"), critic_losses, kClose);
  expect_near(executor.losses("painter_loss"), painter_losses, kClose);
}

TEST(Flow, DataAndModelParallelismTogetherEqualOneDevice) {
  auto graph = chain_graph("cpu:4", -1, {});
  graph.data_parallel("copies", {.nodes = {"front", "back"}, .devices = {{0, 1}, {2, 3}}});
  Executor executor(compile(graph));
  executor.run(20);
  expect_near(executor.losses("loss"), train_by_hand(20, 0.3), kClose);
  for (size_t i = 0; i < executor.weights("front").size(); ++i)
    EXPECT_TRUE(executor.weights("front")[i].equal(executor.weights("front@1")[i])) << i;
}

TEST(Flow, ReplicasWithTheirLossInsideTakeTheMean) {
  auto graph = graph_on("cpu:2");
  add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
  add(graph, "model", "mlp:2,16,3", {.role = Role::Train, .optimizer = {.lr = 0.3}});
  add(graph, "loss", "cross_entropy");
  graph.edge("data.x", "model");
  graph.edge("data.label", "loss.label");
  graph.data_parallel("both", {.nodes = {"model", "loss"}, .devices = {{0, 0}, {1, 1}}});
  Executor executor(compile(graph));
  executor.run(10);
  Net model("mlp:2,16,3", "model");
  const Batches batches;
  std::vector<double> losses;
  for (int64_t i = 0; i < 10; ++i) {
    const auto batch = batches(i);
    auto loss = at::cross_entropy_loss(model(batch[0]), batch[1]);
    losses.push_back(loss.item<double>());
    loss.backward();
    model.step(0.3);
  }
  auto first = executor.losses("loss");
  const auto second = executor.losses("loss@1");
  for (size_t i = 0; i < first.size(); ++i) first[i] = (first[i] + second[i]) / 2;
  expect_near(first, losses, kClose);
}

// As a user writes one.
struct LineImpl : torch::nn::Module {
  LineImpl() : weight(register_parameter("weight", at::zeros({1}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Line);

TEST(Flow, AModuleOfOnesOwnIsTrained) {
  auto graph = graph_on("cpu:2");
  graph.node("x", function(Function([](const Tensors&, int64_t firing) -> Tensors {
               const auto x = at::full({4}, double(firing % 3 + 1));
               return {x, x * 3};
             })),
             {.device = 0, .outputs = {"x", "target"}});
  graph.node("line", module([] { return Line(); }),
             {.device = 0, .role = Role::Train, .optimizer = {.lr = 0.05}});
  add(graph, "loss", "squared", {.device = 1});
  graph.edge("x.x", "line");
  graph.edge("line", "loss.x");
  graph.edge("x.target", "loss.target");
  Executor executor(compile(graph));
  executor.run(60);
  EXPECT_NEAR(number(executor.weights("line")[0]), 3, 1e-3);
}

// A value that comes by itself is a leaf, into which autograd lets nobody write.
TEST(Flow, WritingInPlaceOnTheWayOfGradientsEqualsOneDevice) {
  Net front("mlp:2,16,16", "front"), back("mlp:16,16,3", "back");
  const Batches batches;
  std::vector<double> wanted;
  for (int64_t i = 0; i < 10; ++i) {
    const auto batch = batches(i);
    auto loss = at::cross_entropy_loss(back(front(batch[0]) * 2), batch[1]);
    wanted.push_back(loss.item<double>());
    loss.backward();
    front.step(0.3), back.step(0.3);
  }
  const auto twice = function([](const Tensors& in) { return in[0].mul_(2); });
  for (const auto transport :
       {Transport::Alias, Transport::Copy, Transport::Send, Transport::Host}) {
    auto graph = graph_on("cpu:2");
    add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
    add(graph, "front", "mlp:2,16,16",
        {.device = 0, .role = Role::Train, .optimizer = {.lr = 0.3}});
    graph.node("twice", twice, {.device = 1, .in_place = true});
    add(graph, "back", "mlp:16,16,3", {.device = 1, .role = Role::Train, .optimizer = {.lr = 0.3}});
    add(graph, "loss", "cross_entropy", {.device = 1});
    graph.edge("data.x", "front");
    graph.edge("front", "twice", {.transport = transport});
    graph.edge("twice", "back"), graph.edge("back", "loss.x");
    graph.edge("data.label", "loss.label");
    Executor executor(compile(graph));
    executor.run(10);
    expect_near(executor.losses("loss"), wanted, kClose);
  }
}

struct AddedImpl : torch::nn::Module {
  AddedImpl() : by(register_parameter("by", at::zeros({4}))) {}
  at::Tensor forward(const at::Tensor& x) { return x + by; }
  at::Tensor by;
};
TORCH_MODULE(Added);

// Of a sum autograd gives one tensor back for both: as a gradient it is traded, which writes into
// it, and as that of the input it is on its way to who comes before.
TEST(Flow, ATradeWritesIntoNoGradientThatIsOnItsWay) {
  std::atomic<bool> traded = false;
  auto graph = graph_on("cpu:2");
  graph.node("data",
             function(Function([](const Tensors&, int64_t) { return Tensors{at::ones({4})}; })),
             {.device = 1, .outputs = {"y"}});
  graph.node("first", module([] { return Added(); }),
             {.device = 1, .role = Role::Train, .optimizer = {.lr = 1}});
  graph.edge("data", "first");
  for (const int at : {0, 1}) {
    const std::string name = cat("n", at), loss = cat("loss", at);
    graph.node(name, module([] { return Added(); }),
               {.device = 0, .role = Role::Train, .optimizer = {.lr = 1}});
    graph.node(loss, function([at](const Tensors& in) {
                 return at == 0 ? (in[0] * at::ones_like(in[0])).sum() : in[0].sum() * 5;
               }),
               {.device = 0, .inputs = {"x"}, .outputs = {"loss"}, .loss = "loss"});
    graph.edge(at == 0 ? "first" : "data", name), graph.edge(name, loss);
  }
  graph.exchange({.what = Exchange::What::Gradients, .name = "trade"}, {"n0", "n1"});
  Executor executor(
      compile(graph), {.before = [&](int, const plan::Operation& operation) {
        if (operation.name == "n0 step") traded = true;
        const Time patience = SteadyClock().now() + std::chrono::seconds(5);
        while (operation.name == "first back" && !traded && SteadyClock().now() < patience)
          std::this_thread::yield();
      }});
  executor.run(1);
  EXPECT_TRUE(traded);
  EXPECT_EQ(number(executor.weights("first")[0]), -1);
  EXPECT_EQ(number(executor.weights("n0")[0]), -3);
  EXPECT_EQ(number(executor.weights("n1")[0]), -3);
}

Graph two_learners(const std::string& devices, Exchange exchange) {
  auto graph = graph_on(devices);
  const int second = devices == "cpu:2" ? 1 : 0;
  for (const std::string name : {"a", "b"}) {
    const int device = name == "a" ? 0 : second;
    add(graph, "data_" + name, cat("spirals:batch=16,points=100,bag=", name == "a" ? 1 : 2),
        {.device = device});
    add(graph, name, "mlp:2,8,3",
        {.device = device, .role = Role::Train, .optimizer = {.lr = 0.3}});
    add(graph, "loss_" + name, "cross_entropy", {.device = device});
    graph.chain({"data_" + name, name, "loss_" + name});
    graph.edge("data_" + name + ".label", "loss_" + name + ".label");
  }
  graph.exchange(exchange, {"a", "b"});
  return graph;
}

bool equal_weights(const Executor& executor, double tolerance = 0) {
  for (size_t i = 0; i < executor.weights("a").size(); ++i)
    if (!executor.weights("a")[i].allclose(executor.weights("b")[i], 0, tolerance)) return false;
  return true;
}

TEST(Flow, ModelsThatTradeWeightsAreEqualAfterwards) {
  Executor executor(compile(two_learners("cpu:2", {.name = "trade", .every = 5})));
  executor.run(5);
  EXPECT_TRUE(equal_weights(executor));
  executor.run(1);
  EXPECT_FALSE(equal_weights(executor));
  executor.run(4);
  EXPECT_TRUE(equal_weights(executor));
}

TEST(Flow, TradesAreTheSameOnOneDeviceAndOnTwo) {
  for (const auto& [what, staleness] : {std::pair{Exchange::What::Weights, 0},
                                        {Exchange::What::Weights, 2},
                                        {Exchange::What::Gradients, 0},
                                        {Exchange::What::Gradients, 1}}) {
    const Exchange exchange{.what = what, .name = "trade", .staleness = staleness};
    Executor one(compile(two_learners("cpu", exchange))),
        two(compile(two_learners("cpu:2", exchange)));
    one.run(8), two.run(8);
    expect_near(two.losses("loss_a"), one.losses("loss_a"), kClose);
    expect_near(two.losses("loss_b"), one.losses("loss_b"), kClose);
  }
}

TEST(Flow, StaleGradientsAreThoseOfSoManyRoundsAgo) {
  // By hand: each uses its own gradient and the other's of the round before, nothing at first.
  Executor executor(compile(
      two_learners("cpu:2", {.what = Exchange::What::Gradients, .name = "trade", .staleness = 1})));
  executor.run(6);
  Net nets[2] = {Net("mlp:2,8,3", "a"), Net("mlp:2,8,3", "b")};
  std::vector<double> losses[2];
  Tensors before[2];
  const Function data[2] = {word("spirals:batch=16,points=100,bag=1")(at::kCPU).run,
                            word("spirals:batch=16,points=100,bag=2")(at::kCPU).run};
  for (int64_t round = 0; round < 6; ++round) {
    Tensors now[2];
    for (int k = 0; k < 2; ++k) {
      const auto batch = data[k]({}, round);
      auto loss = at::cross_entropy_loss(nets[k](batch[0]), batch[1]);
      losses[k].push_back(loss.item<double>());
      now[k] = torch::autograd::grad({loss}, nets[k].weights);
    }
    const torch::NoGradGuard no_grad;
    for (int k = 0; k < 2; ++k)
      for (size_t i = 0; i < now[k].size(); ++i) {
        auto sum = now[k][i];
        if (round > 0) sum = sum + before[1 - k][i];
        nets[k].weights[i].sub_(0.3 * sum / 2);
      }
    for (int k = 0; k < 2; ++k) before[k] = now[k];
  }
  expect_near(executor.losses("loss_a"), losses[0], kClose);
  expect_near(executor.losses("loss_b"), losses[1], kClose);
}

// By hand: each takes a step of its own, and then the mean of its weights and those that the other
// gave so many rounds ago, which before the first round are those that it began with.
TEST(Flow, StaleWeightsAreThoseOfSoManyRoundsAgo) {
  for (const int64_t staleness : {1, 2})
    for (const bool ring : {false, true}) {
      Executor executor(
          compile(two_learners("cpu:2", {.name = "trade", .ring = ring, .staleness = staleness})));
      executor.run(5);
      Net nets[2] = {Net("mlp:2,8,3", "a"), Net("mlp:2,8,3", "b")};
      std::vector<double> losses[2];
      std::deque<Tensors> given[2];
      const auto copy = [](const Tensors& from) {
        Tensors to;
        for (const auto& one : from) to.push_back(one.detach().clone());
        return to;
      };
      for (int k = 0; k < 2; ++k) given[k].assign(size_t(staleness), copy(nets[k].weights));
      const Function data[2] = {word("spirals:batch=16,points=100,bag=1")(at::kCPU).run,
                                word("spirals:batch=16,points=100,bag=2")(at::kCPU).run};
      for (int64_t round = 0; round < 5; ++round) {
        for (int k = 0; k < 2; ++k) {
          const auto batch = data[k]({}, round);
          auto loss = at::cross_entropy_loss(nets[k](batch[0]), batch[1]);
          losses[k].push_back(loss.item<double>());
          loss.backward();
          nets[k].step(0.3);
          given[k].push_back(copy(nets[k].weights));
        }
        const torch::NoGradGuard no_grad;
        for (int k = 0; k < 2; ++k)
          for (size_t i = 0; i < nets[k].weights.size(); ++i)
            nets[k].weights[i].add_(given[1 - k].front()[i]).div_(2);
        for (auto& each : given) each.pop_front();
      }
      expect_near(executor.losses("loss_a"), losses[0], kClose);
      expect_near(executor.losses("loss_b"), losses[1], kClose);
    }
}

TEST(Flow, OneGivesItsWeightsToAnother) {
  auto graph = graph_on("cpu:2");
  add(graph, "data", "spirals:batch=16,points=100", {.device = 0});
  add(graph, "a", "mlp:2,8,3", {.device = 0, .role = Role::Train});
  add(graph, "loss", "cross_entropy", {.device = 0});
  add(graph, "b", "mlp:2,8,3", {.device = 1});
  graph.chain({"data", "a", "loss"});
  graph.edge("data.label", "loss.label");
  graph.edge("data.x", "b");
  graph.broadcast_weights("a", {"b"}, 2);
  Executor executor(compile(graph));
  executor.run(1);
  EXPECT_FALSE(equal_weights(executor));
  executor.run(1);
  EXPECT_TRUE(equal_weights(executor));
}

TEST(Flow, TwoTradesOfOneNameAreTwo) {
  auto graph = two_learners("cpu:2", {.name = "trade"});
  graph.exchange({.what = Exchange::What::Gradients, .name = "trade"}, {"a", "b"});
  graph.broadcast_weights("a", {"b"});
  Executor executor(compile(graph));
  executor.run(2);
  EXPECT_TRUE(equal_weights(executor));
}

// What one of them has kept for a later round is nothing to the other.
TEST(Flow, TwoTradesOfOneNodeKeepTheirOwnHistories) {
  auto graph = two_learners(
      "cpu:2", {.what = Exchange::What::Gradients, .name = "gradients", .staleness = 1});
  graph.exchange({.name = "weights"}, {"a", "b"});
  Executor executor(compile(graph));
  executor.run(4);
  EXPECT_TRUE(equal_weights(executor, 1e-6));
  const auto largest = executor.weights("a")[0].abs().max().item<double>();
  EXPECT_GT(largest, 0.1) << "weights, and not gradients of a round before";
}

TEST(Flow, GradientsThatCannotCrossANodeAreRefusedByItsName) {
  auto graph = graph_on("cpu");
  add(graph, "data", "spirals");
  add(graph, "a", "mlp:2,4", {.role = Role::Train});
  graph.node("compiled", [](at::Device) {
    return Body{.run = [](const Tensors& in, int64_t) { return in; },
                .without_gradients = "'m.pt2' is a compiled .pt2"};
  });
  add(graph, "loss", "cross_entropy");
  graph.chain({"data", "a", "compiled", "loss"});
  graph.edge("data.label", "loss.label");
  const auto text = error_of([&] { compile(graph); });
  EXPECT_TRUE(has(text, "node 'compiled' is in the path of gradients from 'a'") &&
              has(text, "m.pt2"))
      << text;
}

TEST(Flow, GradientsPassWhatIsFrozenAndStopAtWhatIsUsed) {
  const auto flow = [](Role role) {
    auto graph = graph_on("cpu");
    add(graph, "data", "spirals:batch=32");
    add(graph, "front", "mlp:2,4", {.role = Role::Train});
    add(graph, "fixed", "mlp:4,3", {.role = role});
    add(graph, "loss", "cross_entropy");
    graph.chain({"data", "front", "fixed", "loss"});
    graph.edge("data.label", "loss.label");
    return compile(graph);
  };
  Executor executor(flow(Role::Frozen));
  const auto front = executor.weights("front")[0].clone(),
             fixed = executor.weights("fixed")[0].clone();
  executor.run(3);
  EXPECT_FALSE(executor.weights("front")[0].equal(front));
  EXPECT_TRUE(executor.weights("fixed")[0].equal(fixed));
  const auto text = error_of([&] { flow(Role::Infer); });
  EXPECT_TRUE(has(text, "node 'front' is to be trained, and none of its edges leads to a loss") &&
              has(text, "'fixed' has role = infer; role = frozen lets them pass"))
      << text;
}

TEST(Flow, WhoeverDrawsFromOneGeneratorIsTold) {
  const auto flow = [](int second, Role role) {
    auto graph = graph_on("cpu:2");
    add(graph, "data", "spirals:batch=32");
    add(graph, "loss", "cross_entropy", {.device = 0});
    const auto net = [](int from, int to) {
      return module([=] {
        return torch::nn::Sequential(torch::nn::Dropout(0.5), torch::nn::Linear(from, to));
      });
    };
    graph.node("front", net(2, 4), {.device = 0, .role = Role::Train});
    graph.node("back", net(4, 3), {.device = second, .role = role});
    graph.chain({"data", "front", "back", "loss"});
    graph.edge("data.label", "loss.label");
    return compile(graph).warnings();
  };
  ASSERT_EQ(flow(1, Role::Train).size(), 1u);
  EXPECT_TRUE(has(flow(1, Role::Train)[0], "nodes 'front', 'back' draw"));
  EXPECT_TRUE(flow(0, Role::Train).empty());
  EXPECT_TRUE(flow(1, Role::Frozen).empty());
}

TEST(Flow, DelaysChangeNothing) {
  const auto delayed = [](uint64_t seed) {
    return RunOptions{.before = [=, calls = std::make_shared<std::atomic<uint64_t>>()](
                                    int queue, const plan::Operation&) {
      const Rng rng(seed, "delays", uint64_t(queue));
      std::this_thread::sleep_for(std::chrono::microseconds(rng.below((*calls)++, 300)));
    }};
  };
  Executor plain(compile(chain_graph("cpu:2", 1, {.transport = Transport::Send})));
  plain.run(8);
  for (const uint64_t seed : {1, 2, 3}) {
    Executor executor(compile(chain_graph("cpu:2", 1, {.transport = Transport::Send})),
                      delayed(seed));
    executor.run(8);
    EXPECT_EQ(executor.losses("loss"), plain.losses("loss"));
  }
}

TEST(Flow, WeightsAreSavedAndBegunWith) {
  const auto path =
      std::filesystem::temp_directory_path() / cat("yoke-flow-", ::getpid(), ".safetensors");
  Executor executor(compile(chain_graph("cpu", 0, {})));
  executor.run(3);
  save_weights(executor.body("front"), path.string());
  const auto begun = with_weights(word("mlp:2,16,16", "another"), path.string())(at::kCPU);
  for (size_t i = 0; i < begun.weights.size(); ++i)
    EXPECT_TRUE(begun.weights[i].equal(executor.weights("front")[i].cpu())) << i;
  EXPECT_TRUE(has(error_of([&] { with_weights(word("mlp:2,8,16"), path.string())(at::kCPU); }),
                  "is of another model"));
  std::filesystem::remove(path);
}

TEST(Flow, ReplicasOfANodeGiveWhatOneCopyGives) {
  for (const std::vector<int>& replicas : {std::vector<int>{0, 1}, {2, 0, 1}}) {
    auto graph = graph_on("cpu:3");
    graph.input("x:FP32[n,2]", {});
    add(graph, "model", "mlp:2,16,3", {.replicas = replicas});
    graph.edge("x", "model");
    graph.output("y", "model");
    Executor executor(compile(graph));
    const auto copies = std::ranges::count_if(executor.compiled().graph.nodes(), [](const Node& n) {
      return n.name.starts_with("model") && n.what.empty();
    });
    EXPECT_EQ(size_t(copies), replicas.size());
    const Net model("mlp:2,16,3", "model");
    for (const int64_t rows : {3, 7, 12}) {  // uneven ones too
      const auto x = at::arange(rows * 2, at::kFloat).view({rows, 2}).sin();
      EXPECT_TRUE(executor.step({x})[0].cpu().allclose(model(x), 0, kClose)) << rows;
    }
  }
}

TEST(Flow, ReplicasOfANodeLearnWhatOneCopyLearns) {
  auto graph = graph_on("cpu:3");
  add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
  add(graph, "model", "mlp:2,16,3",
      {.replicas = {1, 0, 2}, .role = Role::Train, .optimizer = {.lr = 0.3}});
  add(graph, "loss", "cross_entropy", {.device = 0});
  graph.chain({"data", "model", "loss"});
  graph.edge("data.label", "loss.label");
  Executor executor(compile(graph));
  executor.run(20);
  Net model("mlp:2,16,3", "model");
  const Batches batches;
  std::vector<double> losses;
  for (int64_t i = 0; i < 20; ++i) {
    const auto batch = batches(i);
    auto loss = at::cross_entropy_loss(model(batch[0]), batch[1]);
    losses.push_back(loss.item<double>());
    loss.backward();
    model.step(0.3);
  }
  expect_near(executor.losses("loss"), losses, kClose);
  for (const char* copy : {"model", "model@1", "model@2"})
    for (size_t i = 0; i < model.weights.size(); ++i)
      EXPECT_TRUE(executor.weights(copy)[i].cpu().allclose(model.weights[i], 0, kClose))
          << copy << " " << i;
}

// The rules of the optimizers, one weight at a time.
struct Momentum {
  double lr, momentum;
  Tensors velocity = {};
  void operator()(const Tensors& weights) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (velocity.size() <= i)
        velocity.push_back(weights[i].grad().clone());
      else
        velocity[i] = velocity[i] * momentum + weights[i].grad();
      weights[i].sub_(velocity[i] * lr);
    }
  }
};
struct Decay {
  double lr, decay;
  void operator()(const Tensors& weights) const {
    for (const auto& weight : weights) weight.sub_((weight.grad() + weight * decay) * lr);
  }
};
struct AdamW {  // Loshchilov and Hutter, ICLR 2019, algorithm 2
  double lr, decay;
  int64_t steps = 0;
  Tensors mean = {}, square = {};
  void operator()(const Tensors& weights) {
    ++steps;
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto& gradient = weights[i].grad();
      if (mean.size() <= i) {
        mean.push_back(at::zeros_like(gradient));
        square.push_back(at::zeros_like(gradient));
      }
      mean[i] = mean[i] * 0.9 + gradient * 0.1;
      square[i] = square[i] * 0.999 + gradient * gradient * 0.001;
      const auto m = mean[i] / (1 - std::pow(0.9, steps));
      const auto v = square[i] / (1 - std::pow(0.999, steps));
      weights[i].sub_(weights[i] * (lr * decay) + m / (v.sqrt() + 1e-8) * lr);
    }
  }
};

TEST(Flow, EveryPartHasAnOptimizerOfItsOwn) {
  auto graph = graph_on("cpu:3");
  const auto train = [&](const std::string& name, const std::string& text, int device,
                         OptimizerOptions optimizer) {
    add(graph, name, text, {.device = device, .role = Role::Train, .optimizer = optimizer});
  };
  add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
  train("front", "mlp:2,16,16", 0, {.lr = 0.05, .momentum = 0.9});
  train("middle", "mlp:16,16,16", 1,
        {.kind = OptimizerOptions::Kind::AdamW, .lr = 0.01, .weight_decay = 0.1});
  train("back", "mlp:16,3", 2, {.lr = 0.2, .weight_decay = 0.05});
  add(graph, "loss", "cross_entropy", {.device = 2});
  graph.chain({"data", "front", "middle", "back", "loss"});
  graph.edge("data.label", "loss.label");
  Executor executor(compile(graph));
  executor.run(20);

  const Net front("mlp:2,16,16", "front"), middle("mlp:16,16,16", "middle"),
      back("mlp:16,3", "back");
  Momentum momentum{.lr = 0.05, .momentum = 0.9};
  AdamW adamw{.lr = 0.01, .decay = 0.1};
  const Decay decay{.lr = 0.2, .decay = 0.05};
  const Batches batches;
  std::vector<double> losses;
  for (int64_t i = 0; i < 20; ++i) {
    const auto batch = batches(i);
    auto loss = at::cross_entropy_loss(back(middle(front(batch[0]))), batch[1]);
    losses.push_back(loss.item<double>());
    loss.backward();
    const torch::NoGradGuard no_grad;
    momentum(front.weights), adamw(middle.weights), decay(back.weights);
    for (const auto* net : {&front, &middle, &back})
      for (const auto& weight : net->weights) weight.mutable_grad().reset();
  }
  expect_near(executor.losses("loss"), losses, kClose);
  EXPECT_LT(losses.back(), losses.front() * 0.9);
}

TEST(Flow, TrainingWithPortsThatCutRowsEqualsTheSumOfThePieces) {
  for (const auto transport : {Transport::Auto, Transport::Send}) {
    auto graph = graph_on("cpu:2");
    const OptimizerOptions sgd{.lr = 0.1};
    add(graph, "data", "spirals:batch=32,points=200", {.device = 0, .outputs = {"x", "2*label"}});
    add(graph, "front", "mlp:2,16,16",
        {.device = 0, .role = Role::Train, .outputs = {"2*y"}, .optimizer = sgd});
    add(graph, "back", "mlp:16,16,3", {.device = 1, .role = Role::Train, .optimizer = sgd});
    add(graph, "loss", "cross_entropy", {.device = 1});
    graph.edge("data.x", "front");
    graph.edge("front", "back", {.transport = transport});
    graph.edge("back", "loss.x");
    graph.edge("data.label", "loss.label");
    const auto compiled = compile(graph);
    EXPECT_EQ(compiled.firings, (std::vector<int64_t>{1, 1, 2, 2}));
    Executor executor(compiled);
    executor.run(15);

    Net first("mlp:2,16,16", "front"), second("mlp:16,16,3", "back");
    const Batches batches;
    std::vector<double> losses;
    for (int64_t i = 0; i < 15; ++i) {
      const auto batch = batches(i);
      const auto halves = first(batch[0]).chunk(2), labels = batch[1].chunk(2);
      for (size_t half = 0; half < 2; ++half) {
        auto loss = at::cross_entropy_loss(second(halves[half]), labels[half]);
        losses.push_back(loss.item<double>());
        loss.backward({}, /*retain_graph=*/true);
      }
      first.step(0.1), second.step(0.1);
    }
    expect_near(executor.losses("loss"), losses, kClose);
  }
}

TEST(Flow, TrainingWithPortsThatJoinRowsEqualsTheWholeBatch) {
  for (const auto transport : {Transport::Auto, Transport::Send}) {
    auto graph = graph_on("cpu:2");
    const OptimizerOptions sgd{.lr = 0.3};
    add(graph, "data", "spirals:batch=32,points=200", {.device = 0});
    add(graph, "front", "mlp:2,16,16", {.device = 0, .role = Role::Train, .optimizer = sgd});
    add(graph, "back", "mlp:16,16,3",
        {.device = 1, .role = Role::Train, .inputs = {"2*x"}, .optimizer = sgd});
    add(graph, "loss", "cross_entropy", {.device = 1, .inputs = {"x", "2*label"}});
    graph.edge("data.x", "front");
    graph.edge("front", "back", {.transport = transport});
    graph.edge("back", "loss.x");
    graph.edge("data.label", "loss.label");
    const auto compiled = compile(graph);
    EXPECT_EQ(compiled.firings, (std::vector<int64_t>{2, 2, 1, 1}));
    Executor executor(compiled);
    executor.run(15);

    Net first("mlp:2,16,16", "front"), second("mlp:16,16,3", "back");
    const Batches batches;
    std::vector<double> losses;
    for (int64_t i = 0; i < 15; ++i) {
      const auto one = batches(2 * i), two = batches(2 * i + 1);
      auto loss = at::cross_entropy_loss(second(first(at::cat({one[0], two[0]}))),
                                         at::cat({one[1], two[1]}));
      losses.push_back(loss.item<double>());
      loss.backward();
      first.step(0.3), second.step(0.3);
    }
    expect_near(executor.losses("loss"), losses, kClose);
  }
}

}  // namespace
}  // namespace yoke::flow
