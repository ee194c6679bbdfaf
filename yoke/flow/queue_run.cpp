// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/queue_run.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/comm/linger.h"
#include "yoke/flow/first_values.h"
#include "yoke/flow/place.h"
#include "yoke/flow/walk.h"

namespace yoke::flow {
namespace {

constexpr Duration kGrace = std::chrono::seconds(2);  // for the deadlines of waits, which say more

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerOptions& options,
                                                        const Tensors& weights) {
  if (options.kind == OptimizerOptions::Kind::AdamW)
    return std::make_shared<torch::optim::AdamW>(
        weights, torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay));
  return std::make_shared<torch::optim::SGD>(weights, torch::optim::SGDOptions(options.lr)
                                                          .momentum(options.momentum)
                                                          .weight_decay(options.weight_decay));
}

// With the edge's name where there is no memory for it.
Value first_value(const Compiled& compiled, const Edge& edge) {
  try {
    return {.tensor = initial_value(compiled, edge)};
  } catch (const Error&) {
    throw;  // which names it
  } catch (const std::exception& error) {
    fail(Kind::Config, "edge '", edge_name(compiled.graph, edge),
         "' gets no first value: ", comm::text_of(error), "; give it a smaller initial_shape");
  }
}

void make_pipes(Pipes& pipes, const Compiled& compiled, const plan::Program& program,
                const Tasks& tasks) {
  const size_t count = program.channels.size();
  pipes.pipes.clear(), pipes.loose.clear();
  pipes.pipes.resize(count), pipes.loose.resize(count);
  pipes.slots.assign(count, {});
  pipes.giver.assign(count, 0), pipes.taker.assign(count, 0);
  std::vector<int> edge_of(count, -1);
  std::vector<bool> carried(count);  // filled at the entry of a loop
  for (size_t queue = 0; queue < program.rows.size(); ++queue)
    for (size_t i = 0; i < program.rows[queue].size(); ++i) {
      const auto& operation = program.rows[queue][i];
      const auto& task = tasks.rows[queue][i];
      for (size_t k = 0; k < operation.gives.size(); ++k) {
        const auto channel = size_t(operation.gives[k].channel);
        pipes.giver[channel] = int(queue);
        const int edge = k < task.give_edges.size() ? task.give_edges[k] : -1;
        carried[channel] = edge >= 0 && compiled.graph.edges()[size_t(edge)].carried;
      }
      for (size_t k = 0; k < operation.takes.size(); ++k) {
        pipes.taker[size_t(operation.takes[k].channel)] = int(queue);
        if (k < task.take_edges.size())
          edge_of[size_t(operation.takes[k].channel)] = task.take_edges[k];
      }
    }
  for (size_t i = 0; i < count; ++i) {
    const auto& channel = program.channels[i];
    if (!channel.waits && channel.initial == 0) continue;  // a slot
    const Edge* edge = edge_of[i] < 0 ? nullptr : &compiled.graph.edges()[size_t(edge_of[i])];
    if (!channel.waits) {
      pipes.loose[i] = std::make_unique<LoosePipe>(size_t(channel.capacity),
                                                   edge->options.policy == Policy::Latest);
      pipes.loose[i]->give(first_value(compiled, *edge));
      continue;
    }
    pipes.pipes[i] = std::make_unique<Pipe>(size_t(channel.capacity));
    if (channel.initial == 0 || carried[i]) continue;
    const Value first = first_value(compiled, *edge);  // whoever writes into it gets a copy
    for (int64_t k = 0; k < channel.initial; ++k) pipes.pipes[i]->give(first);
  }
  pipes.parts.resize(program.parts.size());
  for (size_t i = 0; i < program.parts.size(); ++i)
    make_pipes(pipes.parts[i], compiled, program.parts[i], tasks.parts[i]);
}

}  // namespace

Run::Run(Compiled given, RunOptions options)
    : compiled(std::move(given)),
      options(std::move(options)),
      nodes(compiled.graph.nodes().size()),
      edges(compiled.graph.edges().size()),
      gradients(edges.size()),
      trades(compiled.graph.exchanges().size() * compiled.program.queues.size()),
      meetings((compiled.graph.regions().size() + 1) * compiled.program.queues.size()),
      begun(compiled.program.queues.size()),
      done(compiled.program.queues.size()),
      wakes(compiled.program.queues.size()),
      awaited(compiled.program.queues.size()),
      waited_until(compiled.program.queues.size()) {
  const auto& graph = compiled.graph;
  crowded = comm::more_than_cores(int(wakes.size()));
  for (size_t i = 0; i < wakes.size(); ++i) alone.push_back({int(i)});
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto& node = graph.nodes()[i];
    nodes[i].figures = {.name = node.name,
                        .queue = compiled.program.queues[size_t(compiled.queue_of[i])],
                        .loads = node.inputs.empty()};
    if (node.options.role == Role::Train && node.options.weights_of.empty())
      nodes[i].optimizer = make_optimizer(node.options.optimizer, compiled.bodies[i].weights);
    if (!node.feeds.empty()) {
      input_names.push_back(node.feeds);
      feeds.push_back(std::make_unique<BoundedQueue<Value>>(kMostUnderWay));
    }
    if (!node.gives.empty()) {
      output_names.push_back(node.gives);
      results.push_back(std::make_unique<BoundedQueue<Value>>(kMostUnderWay));
    }
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto& owner = graph.nodes()[i].options.weights_of;
    if (owner.empty()) continue;
    nodes[i].shares = nodes[size_t(graph.find(owner))].shares = true;
  }
  for (size_t i = 0; i < edges.size(); ++i) {
    const std::string name = edge_name(graph, graph.edges()[i]);
    edges[i].transport = gradients[i].transport =
        transport_of(graph, compiled.queue_of, graph.edges()[i]);
    const auto queue = [&](int node) {
      return compiled.program.queues[size_t(compiled.queue_of[size_t(node)])];
    };
    edges[i].figures.name = name;
    edges[i].figures.queue = queue(graph.edges()[i].to);
    gradients[i].figures.name = "gradient of " + name;
    gradients[i].figures.queue = queue(graph.edges()[i].from);
  }
  reset();
}

void Run::reset() {
  make_pipes(pipes, compiled, compiled.program, compiled.tasks);
  for (auto& node : nodes) {
    node.saved.clear();
    node.history.clear();
  }
  for (auto& body : compiled.bodies)
    for (const auto& weight : body.weights) weight.mutable_grad().reset();
  // Of copies one may have taken a step more than another when a round broke off.
  for (size_t i = 0; broken && i < nodes.size(); ++i) {
    const auto& node = compiled.graph.nodes()[i];
    if (node.copy_of < 0 || node.options.role != Role::Train) continue;
    const auto original = size_t(node.copy_of);
    copy_weights(compiled.bodies[original], compiled.bodies[i]);
    for (const size_t one : {original, i})
      nodes[one].optimizer = make_optimizer(node.options.optimizer, compiled.bodies[one].weights);
  }
  broken = false;
  for (size_t i = 0; i < compiled.graph.exchanges().size(); ++i) {
    const auto& exchange = compiled.graph.exchanges()[i];
    if (exchange.staleness == 0 || exchange.what != Exchange::What::Weights) continue;
    for (const int node : exchange.nodes)
      nodes[size_t(node)].history[int(i)].assign(
          size_t(exchange.staleness), flat(parts_of(compiled.bodies[size_t(node)], true, true)));
    synchronize();  // the queues have streams of their own
  }
  for (auto& edge : edges) edge.last = {};
  last_results.assign(results.size(), {});
  for (auto* queues : {&feeds, &results})
    for (auto& queue : *queues)
      while (queue->pop(Duration(0))) continue;
  base = target;
  for (auto* rounds : {&begun, &done})
    for (auto& each : *rounds) each = target.load();
  finished = false;
  error = nullptr;
}

void Run::set_world(std::shared_ptr<comm::World> world) {
  std::shared_ptr<void> listens;
  if (world) listens = world->on_change([this] { wake_all(); });
  std::optional<std::string> why;
  {
    MutexLock lock(mutex_);
    why = why_;
    world_ = world;
    listens_.swap(listens);
  }
  if (!world) return;
  if (options.on_world) options.on_world(world);
  if (why) world->fail(-1, Kind::Cancelled, cat("the flow was stopped: ", *why));
}

void Run::stop(const std::string& why) {
  std::shared_ptr<comm::World> world;
  {
    MutexLock lock(mutex_);
    why_ = why;
    world = world_;
  }
  if (world) world->fail(-1, Kind::Cancelled, cat("the flow was stopped: ", why));
}

std::optional<std::string> Run::stopped() const {
  MutexLock lock(mutex_);
  return why_;
}

void Run::forget_stop() {
  MutexLock lock(mutex_);
  why_.reset();
}

std::optional<std::string> Run::stuck() const {
  const auto world = this->world();
  if (!world) return std::nullopt;
  const Time now = SteadyClock().now();
  const auto late = [&](Time time) { return now - time > options.timeout + kGrace; };
  if (!late(began)) return std::nullopt;
  std::vector<std::string> doing;
  for (int queue = 0; queue < int(wakes.size()); ++queue) {
    if (!late(last_move(*world, queue))) return std::nullopt;
    const auto last = world->flights().last(queue);
    if (!last || last->finished) continue;
    doing.push_back(cat(compiled.program.queues[size_t(queue)], " has been in '", last->flight.kind,
                        "' of round ", last->flight.sequence, " for ",
                        duration_text(now - last->posted)));
  }
  const auto failure = world->failure();
  return cat(
      failure ? failure->what
              : cat("nothing has moved for ", duration_text(options.timeout), " (flow.timeout_s)"),
      "; ", doing.empty() ? "no queue is in an operation" : join(doing, ", "));
}

Time Run::last_move(comm::World& world, int queue) const {
  const auto last = world.flights().last(queue);
  return std::max({began, waited_until[size_t(queue)].load(),
                   last ? last->finished.value_or(last->posted) : Time()});
}

bool Run::moves(int queue) const {
  const auto world = this->world();
  const Time now = SteadyClock().now();
  std::vector<bool> seen(wakes.size());
  const std::function<bool(int)> does = [&](int one) {
    if (seen[size_t(one)]) return false;
    seen[size_t(one)] = true;
    if (now - last_move(*world, one) <= options.timeout) return true;
    const auto* others = awaited[size_t(one)].load();
    return others != nullptr && std::ranges::any_of(*others, does);
  };
  return world && does(queue);
}

std::shared_ptr<comm::World> Run::world() const {
  MutexLock lock(mutex_);
  return world_;
}

void Run::wake_all() {
  for (auto& wake : wakes) wake.notify_all();
  progress.notify_all();
  given.notify_all();
}

void Run::add_rounds(int64_t rounds) {
  if (all_done()) began = SteadyClock().now();
  target += rounds;
  for (auto& wake : wakes) wake.notify_all();
}

void Run::halt() {
  const int64_t asked = target;
  const auto furthest = [&] {
    int64_t most = base;
    for (const auto& rounds : begun) most = std::max(most, rounds.load());
    return std::min(most, asked);
  };
  do target = furthest();
  while (furthest() > target);
  wake_all();
}

void Run::add_time() {
  seconds += std::chrono::duration<double>(SteadyClock().now() - began).count();
}

bool Run::all_done() const {
  return std::ranges::all_of(done, [&](const auto& rounds) { return rounds.load() >= target; });
}

Tensors parts_of(const Body& body, bool weights, bool buffers) {
  Tensors parts;
  for (const auto& weight : weights ? body.weights : Tensors()) parts.push_back(weight.detach());
  for (const auto& buffer : body.buffers)
    if (buffers && buffer.is_floating_point()) parts.push_back(buffer);
  return parts;
}

at::Tensor flat(const Tensors& parts) {
  Tensors rows;
  for (const auto& part : parts) rows.push_back(part.reshape({-1}));
  return at::cat(rows);
}

Value leave(const at::Tensor& tensor) {
  Value value{.tensor = tensor.requires_grad() ? tensor.detach() : tensor};
  if (tensor.defined() && tensor.is_cuda()) {
    value.ready = std::make_shared<c10::Event>(at::kCUDA);
    value.ready->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(tensor.device()));
  }
  return value;
}

void Run::arrive(Value& value) const {
  if (value.ready) value.ready->synchronize();
}

void Run::synchronize() const {
  for (const auto& device : compiled.graph.options().devices)
    if (const auto at = device_of(device); at.is_cuda())
      c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(at.index());
}

std::vector<double> Run::losses(int node) {
  if (!nodes[size_t(node)].pending.empty()) synchronize();
  auto& state = nodes[size_t(node)];
  for (const auto& loss : state.pending) state.losses.push_back(loss.item<double>());
  state.pending.clear();
  return state.losses;
}

std::vector<plan::Port> Run::ports(bool inputs) const {
  std::vector<plan::Port> result;
  const auto& graph = compiled.graph;
  for (size_t i = 0; i < graph.nodes().size(); ++i) {
    const auto& node = graph.nodes()[i];
    if ((inputs ? node.feeds : node.gives).empty()) continue;
    const Port* port = inputs ? &node.outputs[0] : &node.inputs[0];
    // What it does not say itself, the other end of an edge may.
    for (const auto& edge : graph.edges()) {
      if (port->declared) break;
      if (inputs && edge.from == int(i))
        port = &graph.nodes()[size_t(edge.to)].inputs[size_t(edge.to_port)];
      if (!inputs && edge.to == int(i))
        port = &graph.nodes()[size_t(edge.from)].outputs[size_t(edge.from_port)];
    }
    plan::Port told = port->port;
    told.name = node.name;
    for (auto& size : told.shape) size.name.clear();
    if (!port->declared) told.shape.clear();
    result.push_back(told);
  }
  return result;
}

void Run::queue(comm::Communicator& world) {
  const auto whole = this->world();
  const auto me = size_t(world.rank());
  // Said before it is asked, so that halt() knows of whoever has not seen its target.
  const auto may_begin = [&](int64_t round) {
    begun[me] = round + 1;
    if (round < target) return true;
    begun[me] = round;
    return false;
  };
  if (options.tracer) options.tracer->name_thread(int(me), compiled.program.queues[me]);
  Walk walk(*this, world, *whole);
  for (int64_t round = base;; ++round) {
    while (!may_begin(round)) {
      const auto seen = wakes[me].key();
      whole->check(int(me));
      if (ending) return;
      if (round < target) continue;
      if (comm::linger(crowded, [&] { return round < target || ending; })) continue;
      wakes[me].wait(seen, SteadyClock().now() + std::chrono::seconds(1));
    }
    walk.row(round);
    done[me] = round + 1;
    progress.notify_all();
  }
}

}  // namespace yoke::flow
