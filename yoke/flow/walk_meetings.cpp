// SPDX-License-Identifier: Apache-2.0
// Where queues meet: messages, trades of weights and gradients, loops and branches.
#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/walk.h"
#include "yoke/models/port.h"

namespace yoke::flow {

void Walk::meet(const std::vector<int>& queues, const Task& task,
                const std::function<void()>& meeting) {
  const auto& regions = run_.compiled.graph.regions();
  const size_t place = task.region < 0 ? regions.size() : size_t(task.region);
  const Time begin = clock_.now();
  const Awaits others(*this, queues);
  try {
    meeting();
  } catch (...) {
    retell(task.region < 0 ? "the end of a phase"
                           : cat(task.kind == Task::Kind::Loop ? "loop '" : "branch '",
                                 regions[place].name, "'"),
           cat("where ", run_.compiled.program.queues[size_t(me_)], " met the others"));
  }
  auto& figures = run_.meetings[place * run_.wakes.size() + size_t(me_)];
  ++figures.values;
  figures.wait_s += std::chrono::duration<double>(clock_.now() - begin).count();
}

// Rank, datatype and sizes go first: the other end does not know them.
void Walk::send(Level& level, const plan::Operation& operation) {
  const auto& access = operation.takes[0];
  await_values(level, operation, {.kind = Task::Kind::Send});
  for (int64_t k = 0; k < access.count; ++k) {
    const Value value = take(level, access.channel);
    auto head = at::full({12}, -1, at::kLong);
    try {
      if (value.tensor.defined()) {
        if (value.tensor.dim() > 10)
          fail(Kind::Usage, "a value that is sent has 10 sizes at most, got ", value.tensor.dim(),
               "; let the node flatten it, or give the edge another transport");
        auto* const numbers = head.mutable_data_ptr<int64_t>();
        numbers[0] = value.tensor.dim();
        numbers[1] = int64_t(value.tensor.scalar_type());
        std::ranges::copy(value.tensor.sizes(), numbers + 2);
      }
      const Awaits other(*this, run_.alone[size_t(operation.peer)]);
      world_.send(head, operation.peer).wait();
      if (value.tensor.defined())
        world_.send(value.tensor.to(device_).contiguous(), operation.peer).wait();
    } catch (...) {
      retell(cat("edge '", operation.what, "'"), cat("it sent ", describe(value.tensor)));
    }
  }
}

double Walk::receive(Level& level, const plan::Operation& operation) {
  const auto& access = operation.gives[0];
  Tensors received;
  Duration moved{0};
  for (int64_t k = 0; k < access.count; ++k) {
    const auto head = at::full({12}, -1, at::kLong);
    const auto* const numbers = head.const_data_ptr<int64_t>();
    const auto sizes = [&] { return at::IntArrayRef(numbers + 2, size_t(numbers[0])); };
    try {
      const Awaits other(*this, run_.alone[size_t(operation.peer)]);
      world_.recv(head, operation.peer).wait();
      const Time begin = clock_.now();  // who sends is there
      received.emplace_back();
      if (numbers[0] < 0) continue;
      received.back() =
          at::empty(sizes(), at::TensorOptions(device_).dtype(at::ScalarType(numbers[1])));
      world_.recv(received.back(), operation.peer).wait();
      moved += clock_.now() - begin;
    } catch (...) {
      retell(cat("edge '", operation.what, "'"),
             numbers[0] < 0
                 ? "nothing had come"
                 : cat("it was sent ",
                       plan::to_text(models::type_of(at::ScalarType(numbers[1])), sizes())));
    }
  }
  await_room(level, operation, {.kind = Task::Kind::Recv});
  for (auto& tensor : received) give(level, access.channel, leave(tensor));
  return std::chrono::duration<double>(moved).count();
}

void Walk::trade(Level& level, const plan::Operation& operation, const Task& task) {
  const auto& exchange = run_.compiled.graph.exchanges()[size_t(task.exchange)];
  if ((round_ + 1) % exchange.every != 0) return;
  auto& figures = run_.trades[size_t(task.exchange) * run_.wakes.size() + size_t(me_)];
  ++figures.values;
  const torch::NoGradGuard no_grad;
  const bool gradients = exchange.what == Exchange::What::Gradients;
  bool weights = true, buffers = !gradients;  // which of them are traded
  const auto traded = [&](int node) {
    const auto& body = run_.compiled.bodies[size_t(node)];
    if (!gradients || !weights) return parts_of(body, weights, buffers);
    Tensors parts;
    for (const auto& weight : body.weights) {
      if (!weight.grad().defined()) weight.mutable_grad() = at::zeros_like(weight);
      parts.push_back(weight.grad());
    }
    return parts;
  };
  for (const int node : task.nodes)
    for (const auto& part : traded(node)) figures.bytes += part.nbytes();
  const auto store = [&](int node, const at::Tensor& values) {
    int64_t at = 0;
    for (auto part : traded(node)) {
      part.copy_(values.narrow(0, at, part.numel()).view_as(part));
      at += part.numel();
    }
  };
  const comm::Communicator* group =
      operation.group < 0 ? nullptr : &level.groups[size_t(operation.group)];
  const auto& queues = group ? level.queues(operation) : run_.alone[size_t(me_)];
  const Awaits others(*this, queues);
  const auto give_to_all = [&](int source) {
    const bool here = std::ranges::count(task.nodes, source) > 0;
    const auto parts = traded(here ? source : task.nodes[0]);
    if (parts.empty()) return;
    auto values = flat(parts);
    const int from = run_.compiled.queue_of[size_t(source)];
    if (group)
      group->broadcast(values, int(std::ranges::find(queues, from) - queues.begin())).wait();
    for (const int node : task.nodes)
      if (node != source) store(node, values);
  };
  if (exchange.source >= 0) return give_to_all(exchange.source);
  Tensors mine, old;
  for (const int node : task.nodes) {
    auto& history = run_.nodes[size_t(node)].history[task.exchange];
    mine.push_back(flat(traded(node)));
    history.push_back(mine.back());
    // There was no gradient so long ago; of weights the first are there.
    const bool early = int64_t(history.size()) <= exchange.staleness;
    old.push_back(early ? at::zeros_like(mine.back()) : history.front());
    if (!early) history.pop_front();
  }
  const auto count = int64_t(exchange.nodes.size());
  const auto place = [&](size_t i) {
    return std::ranges::find(exchange.nodes, task.nodes[i]) - exchange.nodes.begin();
  };
  if (exchange.ring) {  // a row for each, in which the others have nothing
    auto rows = at::zeros({count, old[0].numel()}, old[0].options());
    for (size_t i = 0; i < old.size(); ++i) rows[place(i)].copy_(old[i]);
    if (group) group->all_reduce(rows).wait();
    for (size_t i = 0; i < task.nodes.size(); ++i) {
      const auto sum = mine[i] + rows[(place(i) + count - 1) % count];
      store(task.nodes[i], exchange.sum ? sum : sum / 2);
    }
    return;
  }
  auto sum = old[0].clone();
  for (size_t i = 1; i < old.size(); ++i) sum += old[i];
  if (group) group->all_reduce(sum).wait();
  for (size_t i = 0; i < task.nodes.size(); ++i) {
    auto result = exchange.staleness == 0 ? sum : sum - old[i] + mine[i];
    if (!exchange.sum) result = result / double(count);
    store(task.nodes[i], result);
  }
  weights = false, buffers = true;  // of which each copy has made its own, from its own rows
  if (exchange.copies) give_to_all(exchange.nodes[0]);
}

// Every member of the group hears what the one who knows says; and has come so far.
bool Walk::decide(Level& level, const plan::Operation& operation, const Task& task,
                  const Value& value) {
  auto answer = at::zeros({1}, at::kLong);
  if (task.decides) {
    const auto& region = run_.compiled.graph.regions()[size_t(task.region)];
    const auto& node = run_.compiled.graph.nodes()[size_t(region.decides.first)];
    if (!value.tensor.defined() || value.tensor.numel() != 1)
      fail(Kind::Usage, "node '", node.name, "' in round ", round_, ": output '",
           node.outputs[size_t(region.decides.second)].port.name, "', by which '", region.name,
           "' decides, must be one number, got ", describe(value.tensor),
           "; give it a node that makes one of it, such as above:than=0.5");
    if (value.ready) value.ready->synchronize();
    answer.fill_(int64_t(value.tensor.item<double>() != 0));
  }
  meet(level.queues(operation), task,
       [&] { level.groups[size_t(operation.group)].all_reduce(answer).wait(); });
  return answer.item<int64_t>() != 0;
}

void Walk::loop(Level& level, const plan::Operation& operation, const Task& task) {
  const auto& region = run_.compiled.graph.regions()[size_t(task.region)];
  auto& body = level.parts[size_t(operation.parts[0])];
  const auto& group = level.groups[size_t(operation.group)];
  await_values(level, operation, task);
  std::vector<Value> taken;
  for (const auto& access : operation.takes) taken.push_back(take(level, access.channel));
  meet(level.queues(operation), task, [&] {
    group.barrier();  // what the last turn of the round before has carried is there
    for (size_t i = 0; i < taken.size(); ++i) {
      const auto& inner = task.enters[i];
      if (inner.carried) body.pipes.pipes[size_t(inner.channel)]->clear();
      if (inner.carried)
        body.pipes.pipes[size_t(inner.channel)]->give(std::move(taken[i]));
      else
        body.pipes.slots[size_t(inner.channel)] = std::move(taken[i]);
    }
    group.barrier();  // and nobody carries before it is so everywhere
  });
  for (int64_t turn = 0; turn < region.most; ++turn) {
    row(body);
    if (region.decides.first < 0) continue;
    const Value& until = task.decides ? body.pipes.slots[size_t(task.decider_channel)] : Value{};
    if (decide(level, operation, task, until)) break;
  }
  await_room(level, operation, task);
  for (size_t i = 0; i < operation.gives.size(); ++i)
    give(level, operation.gives[i].channel, body.pipes.slots[size_t(task.leaves[i][0].channel)]);
}

void Walk::branch(Level& level, const plan::Operation& operation, const Task& task) {
  await_values(level, operation, task);
  std::vector<Value> taken;
  for (const auto& access : operation.takes) taken.push_back(take(level, access.channel));
  const Value when = task.decides ? taken[size_t(task.decider_channel)] : Value{};
  const int arm = decide(level, operation, task, when) ? 0 : 1;
  for (size_t i = 0; i < taken.size(); ++i)
    // Also for the arm that is not taken now: a value of every n rounds serves again later.
    if (task.enters[i].arm >= 0 && taken[i].tensor.defined())
      level.parts[size_t(operation.parts[size_t(task.enters[i].arm)])]
          .pipes.slots[size_t(task.enters[i].channel)] = std::move(taken[i]);
  auto& body = level.parts[size_t(operation.parts[size_t(arm)])];
  row(body);
  await_room(level, operation, task);
  for (size_t i = 0; i < operation.gives.size(); ++i)
    give(level, operation.gives[i].channel,
         body.pipes.slots[size_t(task.leaves[i][size_t(arm)].channel)]);
}

}  // namespace yoke::flow
