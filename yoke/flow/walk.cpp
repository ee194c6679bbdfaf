// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/walk.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/comm/linger.h"
#include "yoke/flow/place.h"
#include "yoke/models/port.h"

namespace yoke::flow {
namespace {

using Kind = yoke::Kind;

double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

// By port; of one without a port the shape alone.
std::string describe(const std::vector<Port>& ports, const std::vector<Tensors>& values) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < values.size(); ++i)
    texts.push_back(
        cat(i < ports.size() ? ports[i].port.name + " " : "", flow::describe(values[i])));
  return texts.empty() ? "nothing" : join(texts, ", ");
}
std::string describe(const std::vector<Port>& ports, const Tensors& values) {
  std::vector<Tensors> each;
  for (const auto& value : values) each.push_back({value});
  return describe(ports, each);
}

using Sizes = std::vector<std::pair<const std::string*, int64_t>>;  // of a firing, by name

// One value of a port; a size that has a name is the same in all of the firing.
bool fits(const Port& declared, const at::Tensor& value, Sizes& sizes) {
  if (!declared.declared) return true;
  const auto& port = declared.port;
  if (!value.defined() || value.scalar_type() != models::dtype_of(port.type) ||
      value.dim() != int64_t(port.shape.size()))
    return false;
  for (size_t d = 0; d < port.shape.size(); ++d) {
    const auto& wanted = port.shape[d];
    const int64_t size = value.size(int64_t(d));
    if (!wanted.holds(size)) return false;
    if (wanted.name.empty()) continue;
    const auto known =
        std::ranges::find_if(sizes, [&](const auto& item) { return *item.first == wanted.name; });
    if (known == sizes.end())
      sizes.emplace_back(&wanted.name, size);
    else if (known->second != size)
      return false;
  }
  return true;
}

bool can_cut(const at::Tensor& whole, int64_t count) {
  return whole.defined() && whole.dim() > 0 && whole.size(0) % count == 0;
}

// How often each was written into, as far as LibTorch counts.
std::vector<int64_t> versions_of(const Tensors& values) {
  std::vector<int64_t> versions;
  for (const auto& value : values)
    versions.push_back(value.defined() && !value.is_inference() ? value._version() : 0);
  return versions;
}

// Somebody else may be reading it, and what is proved knows of declared writers alone.
void check_unwritten(const Node& node, const Tensors& inputs, const std::vector<int64_t>& before) {
  const auto after = versions_of(inputs);
  for (size_t i = node.options.in_place ? 1 : 0; i < inputs.size(); ++i)
    if (after[i] != before[i])
      fail(Kind::Usage, "its input '", node.inputs[i].port.name,
           "' was written into while it computed, wanted as it came, for others may have it; ",
           i == 0 ? "say in_place = true of the node, which then gets a value of its own"
                  : "in_place = true is for the first input: put this one there, or let the model "
                    "write into a copy");
}

// To be written into: autograd may give one tensor for several, or what came to it, or one number
// for all of a shape.
at::Tensor unshared(at::Tensor gradient) {
  const bool alone = gradient.use_count() == 1 &&
                     (!gradient.has_storage() || (gradient.storage().use_count() == 1 &&
                                                  gradient.is_non_overlapping_and_dense()));
  return alone ? gradient : gradient.clone();
}

}  // namespace

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "nothing";
  return plan::to_text(models::type_of(tensor.scalar_type()), tensor.sizes());
}

std::string describe(const Tensors& values) {
  constexpr size_t kMost = 8;
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(kMost, values.size()); ++i) texts.push_back(describe(values[i]));
  if (values.size() > kMost) texts.push_back(cat("… (", values.size(), ")"));
  return texts.empty() ? "nothing" : join(texts, " ");
}

Walk::Walk(Run& run, comm::Communicator world, comm::World& whole)
    : run_(run),
      world_(std::move(world)),
      whole_(whole),
      me_(world_.rank()),
      device_(device_of(run.compiled.graph.options().devices[size_t(world_.rank())])),
      flights_(~0u),
      top_(enter(run.compiled.program, run.compiled.tasks, run.pipes)) {
  whole_.flights().name_group(flights_, run.compiled.graph.options().name);
}

Walk::Level Walk::enter(const plan::Program& program, const Tasks& tasks, Pipes& pipes) {
  Level level{.program = program, .tasks = tasks, .pipes = pipes};
  // Collective: every queue splits for every group, in this order.
  for (const auto& group : program.groups)
    level.groups.push_back(world_.split(std::ranges::count(group.queues, me_) > 0 ? 0 : -1, me_));
  for (const auto& operation : program.rows[size_t(me_)])
    level.names.push_back(operation.name.c_str());
  for (size_t i = 0; i < program.parts.size(); ++i)
    level.parts.push_back(enter(program.parts[i], tasks.parts[i], pipes.parts[i]));
  return level;
}

void Walk::row(int64_t round) {
  round_ = round;
  row(top_);
}

void Walk::row(Level& level) {
  const auto& operations = level.program.rows[size_t(me_)];
  const auto& tasks = level.tasks.rows[size_t(me_)];
  for (size_t i = 0; i < operations.size(); ++i) {
    whole_.check(me_);  // what has all its values waits for nothing that would tell
    if (run_.options.before) run_.options.before(me_, operations[i]);
    const auto ticket = whole_.flights().post(
        me_, {.kind = level.names[i], .group = flights_, .sequence = uint64_t(round_)});
    try {
      perform(level, operations[i], tasks[i], level.names[i]);
    } catch (const Error&) {
      throw;  // which has been told
    } catch (const std::exception&) {
      retell(cat("operation '", operations[i].name, "'"),
             cat("on ", run_.compiled.program.queues[size_t(me_)]));
    }
    whole_.flights().finish(me_, ticket);
  }
}

void Walk::perform(Level& level, const plan::Operation& operation, const Task& task,
                   const char* name) {
  switch (task.kind) {
    case Task::Kind::Forward:
      return forward(level, operation, task, name);
    case Task::Kind::Backward:
      return backward(level, operation, task, name);
    case Task::Kind::Step:
      return step(task, name);
    case Task::Kind::Send:
    case Task::Kind::Recv: {
      auto& edge = (task.gradient ? run_.gradients : run_.edges)[size_t(task.edge)].figures;
      const Time begin = clock_.now();
      if (task.kind == Task::Kind::Send)
        send(level, operation);
      else
        edge.move_s += receive(level, operation);
      const Time end = ended(name, observe::Category::Comm, begin);
      (task.kind == Task::Kind::Send ? edge.room_s : edge.wait_s) += seconds(end - begin);
      return;
    }
    case Task::Kind::Trade: {
      const Time begin = clock_.now();
      try {
        trade(level, operation, task);
      } catch (...) {
        const auto& graph = run_.compiled.graph;
        std::vector<std::string> texts;
        for (const int node : task.nodes)
          texts.push_back(cat("node '", graph.nodes()[size_t(node)].name, "' has ",
                              describe(run_.compiled.bodies[size_t(node)].weights)));
        retell(cat("exchange '", graph.exchanges()[size_t(task.exchange)].name, "'"),
               join(texts, ", "));
      }
      const Time end = ended(name, observe::Category::Comm, begin);
      run_.trades[size_t(task.exchange) * run_.wakes.size() + size_t(me_)].move_s +=
          seconds(end - begin);
      return;
    }
    case Task::Kind::Barrier:
      return meet(level.queues(operation), task, [&] {
        const Time begin = clock_.now();
        level.groups[size_t(operation.group)].barrier();
        ended(name, observe::Category::Wait, begin);
      });
    case Task::Kind::Loop:
      return loop(level, operation, task);
    case Task::Kind::Branch:
      return branch(level, operation, task);
  }
}

template <typename Ready>
double Walk::await(const Ready& ready, int other, const std::string& channel, const char* what) {
  constexpr Duration kLook = std::chrono::seconds(1);  // between looks at the other
  if (ready()) return 0;
  const Time begin = clock_.now();
  if (!comm::linger(run_.crowded, ready)) {
    const Awaits awaits(*this, run_.alone[size_t(other)]);
    auto& wake = run_.wakes[size_t(me_)];
    for (Time late = begin + run_.options.timeout;;) {
      const auto seen = wake.key();
      if (ready()) break;
      whole_.check(me_);
      const Time now = clock_.now();
      if (now > late && !run_.moves(other))
        fail(Kind::Timeout, run_.compiled.program.queues[size_t(me_)], " waited ",
             seconds(run_.options.timeout), " s (flow.timeout_s) for ", what, " '", channel,
             "' in round ", round_);
      if (now > late) late = now + std::min(kLook, run_.options.timeout);
      wake.wait(seen, std::min(now + kLook, late + std::chrono::milliseconds(1)));
    }
  }
  const Time end = clock_.now();
  if (run_.options.tracer)
    run_.options.tracer->record(channel.c_str(), observe::Category::Wait, begin, end);
  return seconds(end - begin);
}

EdgeState* Walk::edge_state(const Task& task, size_t place, bool given) {
  const auto& edges = given ? task.give_edges : task.take_edges;
  if (place >= edges.size() || edges[place] < 0) return nullptr;
  return &(task.kind == Task::Kind::Backward ? run_.gradients : run_.edges)[size_t(edges[place])];
}

void Walk::await_values(Level& level, const plan::Operation& operation, const Task& task) {
  for (size_t i = 0; i < operation.takes.size(); ++i) {
    const auto& access = operation.takes[i];
    const auto* pipe = level.pipes.pipes[size_t(access.channel)].get();
    if (pipe == nullptr) continue;
    const double waited = await([&] { return pipe->size() >= size_t(access.count); },
                                level.pipes.giver[size_t(access.channel)],
                                level.program.channels[size_t(access.channel)].name, "a value of");
    if (waited == 0) continue;
    if (auto* edge = edge_state(task, i, false)) edge->figures.wait_s += waited;
    if (task.node >= 0) run_.nodes[size_t(task.node)].figures.wait_s += waited;
  }
}

void Walk::await_room(Level& level, const plan::Operation& operation, const Task& task) {
  for (size_t i = 0; i < operation.gives.size(); ++i) {
    const auto& access = operation.gives[i];
    const auto* pipe = level.pipes.pipes[size_t(access.channel)].get();
    if (pipe == nullptr) continue;
    const double waited = await([&] { return pipe->room() >= size_t(access.count); },
                                level.pipes.taker[size_t(access.channel)],
                                level.program.channels[size_t(access.channel)].name, "room in");
    if (waited == 0) continue;
    if (auto* edge = edge_state(task, i, true)) edge->figures.room_s += waited;
    if (task.node >= 0) run_.nodes[size_t(task.node)].figures.wait_s += waited;
  }
}

Value Walk::take(Level& level, int channel) {
  const auto at = size_t(channel);
  if (auto* loose = level.pipes.loose[at].get()) return loose->take();
  auto* pipe = level.pipes.pipes[at].get();
  if (pipe == nullptr) return level.pipes.slots[at];
  Value value = pipe->take();
  if (const int giver = level.pipes.giver[at]; giver != me_) run_.wakes[size_t(giver)].notify_all();
  return value;
}

void Walk::give(Level& level, int channel, Value value) {
  const auto at = size_t(channel);
  if (auto* loose = level.pipes.loose[at].get()) return loose->give(std::move(value));
  auto* pipe = level.pipes.pipes[at].get();
  if (pipe == nullptr) {
    if (value.tensor.defined()) level.pipes.slots[at] = std::move(value);
    return;
  }
  pipe->give(std::move(value));
  if (const int taker = level.pipes.taker[at]; taker != me_) run_.wakes[size_t(taker)].notify_all();
}

Time Walk::ended(const char* name, observe::Category category, Time begin) const {
  if (run_.options.tracer == nullptr || whole_.failed()) return clock_.now();
  if (device_.is_cuda()) {  // else it would be the time of the launches
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    guard.synchronizeStream(guard.getStream(device_));
  }
  const Time end = clock_.now();
  run_.options.tracer->record(name, category, begin, end);
  return end;
}

void Walk::await_stream(const Value& value) const {
  if (!value.ready) return;
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const auto from = value.tensor.device();
  if (device_.is_cuda()) value.ready->block(guard.getStream(device_));
  if (from != device_ && from.is_cuda()) value.ready->block(guard.getStream(from));
  if (from.is_cuda()) value.tensor.record_stream(guard.getStream(from));
}

// To be written into: itself where nobody else has it, which on a GPU the host cannot tell.
at::Tensor Walk::owned(const at::Tensor& tensor, long held) const {
  const bool leaf = tensor.requires_grad() && tensor.is_leaf();  // autograd wants it as it is
  const bool alone = !leaf && !device_.is_cuda() && long(tensor.use_count()) == held &&
                     tensor.storage().use_count() == 1;
  return alone ? tensor : tensor.clone();
}

// What was taken, here: on this queue's device and in its stream.
at::Tensor Walk::arrive(Value value, EdgeState& edge, const Edge* options) {
  if (options != nullptr && options->options.every > 1) {
    if (value.tensor.defined()) edge.last = value;
    value = edge.last;
  }
  if (!value.tensor.defined()) return value.tensor;
  at::Tensor tensor = value.tensor;
  const auto from = tensor.device();
  await_stream(value);
  const bool there = edge.transport == Transport::Alias || edge.transport == Transport::Send;
  if (there && from == device_) return tensor;
  const Time begin = clock_.now();
  try {
    if (edge.transport == Transport::Host)
      tensor = tensor.to(at::kCPU, tensor.scalar_type(), false, true);
    if (edge.transport == Transport::Copy || tensor.device() != device_)
      tensor = tensor.to(device_, tensor.scalar_type(),
                         /*non_blocking=*/from.is_cuda() && device_.is_cuda(),
                         /*copy=*/edge.transport == Transport::Copy);
  } catch (...) {
    retell(cat("edge '", edge.figures.name, "'"),
           cat("it carried ", describe(value.tensor), " from ", from.str(), " to ", device_.str()));
  }
  edge.figures.move_s +=
      seconds(ended(edge.figures.name.c_str(), observe::Category::Comm, begin) - begin);
  return tensor;
}

void Walk::retell(const std::string& who, const std::string& given,
                  const std::string& where) const {
  auto kind = Kind::Internal;
  std::string what;
  try {
    throw;
  } catch (const Error& error) {
    kind = error.kind();
    what = error.what();
  } catch (const std::exception& error) {
    what = comm::text_of(error);
    if (device_.is_cuda() && what.find("CUDA error") != what.npos) kind = Kind::Device;
  }
  fail(kind, who, " failed in round ", round_, where, ": ", what, "\n  ", given);
}

template <typename Compute>
void Walk::guarded(const Task& task, const Tensors& inputs, const Compute& compute) {
  try {
    compute();
  } catch (...) {
    const auto& node = run_.compiled.graph.nodes()[size_t(task.node)];
    retell(cat("node '", node.name, "'"), cat("it was given ", describe(node.inputs, inputs)),
           task.kind == Task::Kind::Backward ? " on the way back"
           : task.kind == Task::Kind::Step   ? " in its optimizer"
                                             : "");
  }
}

void Walk::forward(Level& level, const plan::Operation& operation, const Task& task,
                   const char* name) {
  const auto& node = run_.compiled.graph.nodes()[size_t(task.node)];
  const auto& edges = run_.compiled.graph.edges();
  auto& state = run_.nodes[size_t(task.node)];
  const auto& body = run_.compiled.bodies[size_t(task.node)];
  const bool trains = run_.compiled.trains[size_t(task.node)];
  await_values(level, operation, task);
  std::vector<Tensors> taken(operation.takes.size());
  for (size_t i = 0; i < taken.size(); ++i)
    for (int64_t k = 0; k < operation.takes[i].count; ++k) {
      const int edge = task.take_edges[i];
      auto tensor = arrive(take(level, operation.takes[i].channel), run_.edges[size_t(edge)],
                           &edges[size_t(edge)]);
      if (trains && tensor.defined() && tensor.is_floating_point() &&
          std::ranges::count(run_.compiled.carries[size_t(task.node)], task.take_ports[i]) > 0)
        tensor = tensor.detach().requires_grad_();
      taken[i].push_back(std::move(tensor));
    }
  Tensors outputs, inputs;
  Sizes sizes;
  const Time begin = clock_.now();
  const auto refuse = [&](const char* side, const Port& port, const at::Tensor& value,
                          const std::string& all) {
    fail(Kind::Usage, "node '", node.name, "' in round ", round_, ": ", side, " '", port.port.name,
         "' wants ", port.port.wanted(), ", got ", describe(value), "; all of them: ", all);
  };
  {
    const torch::AutoGradMode grad(trains);
    for (size_t i = 0; i < taken.size(); ++i)
      for (const auto& value : taken[i])
        if (!fits(node.inputs[i], value, sizes))
          refuse(node.gives.empty() ? "input" : "output", node.inputs[i], value,
                 describe(node.inputs, taken));
    try {
      for (auto& values : taken) inputs.push_back(values.size() == 1 ? values[0] : at::cat(values));
    } catch (...) {
      retell(
          cat("node '", node.name, "'"), cat("it was given ", describe(node.inputs, taken)),
          cat(", where values of input '", node.inputs[inputs.size()].port.name, "' are joined"));
    }
    if (!node.feeds.empty()) {
      const auto place = std::ranges::find(run_.input_names, node.feeds) - run_.input_names.begin();
      auto fed = run_.feeds[size_t(place)]->pop(run_.options.timeout);
      if (!fed) fail(Kind::Internal, "input '", node.feeds, "' has no value in round ", round_);
      await_stream(*fed);
      guarded(task, {fed->tensor}, [&] { outputs.push_back(fed->tensor.to(device_)); });
    } else if (!node.gives.empty()) {
      const auto place =
          std::ranges::find(run_.output_names, node.gives) - run_.output_names.begin();
      auto value = leave(inputs[0]);
      if (run_.keeps_last)
        run_.last_results[size_t(place)] = std::move(value);
      else
        (void)run_.results[size_t(place)]->push(value, run_.options.timeout);
      run_.given.notify_all();
    } else {
      if (state.shares && body.set_mode) body.set_mode(node.options.role == Role::Train);
      guarded(task, inputs, [&] {
        if (node.options.in_place && !inputs.empty() && inputs[0].defined())
          inputs[0] = owned(inputs[0], taken[0].size() == 1 ? 2 : 1);
        const auto before = versions_of(inputs);
        outputs = body.run(inputs, state.firing);
        check_unwritten(node, inputs, before);
      });
    }
    if (outputs.size() < node.outputs.size())
      fail(Kind::Usage, "node '", node.name, "' in round ", round_, " gave ", outputs.size(),
           " values, and has ", node.outputs.size(), " outputs");
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const auto& port = node.outputs[i];
      const auto one = [&](const at::Tensor& value) {
        if (!fits(port, value, sizes))
          refuse("output", port, value, describe(node.outputs, outputs));
      };
      if (port.tokens == 1 || !port.declared)
        one(outputs[i]);
      else if (can_cut(outputs[i], port.tokens))  // else it is refused where it is cut
        for (const auto& piece : outputs[i].chunk(port.tokens)) one(piece);
    }
  }
  ++state.firing;
  for (size_t i = 0; i < node.outputs.size(); ++i)
    if (node.outputs[i].port.name == node.options.loss) {
      if (outputs[i].numel() != 1)
        fail(Kind::Usage, "node '", node.name, "' in round ", round_, ": loss '", node.options.loss,
             "' must be one number, got ", describe(outputs[i]));
      const auto loss = outputs[i].detach();
      if (loss.is_cuda())
        state.pending.push_back(loss);  // nobody waits for the GPU here
      else
        state.losses.push_back(loss.item<double>());
    }
  state.figures.compute_s += seconds(ended(name, observe::Category::Compute, begin) - begin);
  ++state.figures.firings;

  await_room(level, operation, task);
  for (size_t i = 0; i < operation.gives.size(); ++i) {
    const auto& access = operation.gives[i];
    const at::Tensor& whole = outputs[size_t(task.give_ports[i])];
    const int edge = task.give_edges[i];
    const bool due = edge < 0 || (round_ - run_.base) % edges[size_t(edge)].options.every == 0;
    if (access.count > 1 && !can_cut(whole, access.count))
      fail(Kind::Usage, "node '", node.name, "' in round ", round_, " gives ", access.count,
           " values a firing, and ", describe(whole), " has rows that cannot be cut so");
    const auto pieces = access.count > 1 ? whole.chunk(access.count) : Tensors{whole};
    for (const auto& piece : pieces) {
      Value value = due ? leave(piece) : Value{};
      if (edge >= 0) {
        ++run_.edges[size_t(edge)].figures.values;
        run_.edges[size_t(edge)].figures.bytes += value.bytes();
      }
      give(level, access.channel, std::move(value));
    }
  }
  if (trains) state.saved.push_back({.inputs = std::move(taken), .outputs = std::move(outputs)});
}

void Walk::backward(Level& level, const plan::Operation& operation, const Task& task,
                    const char* name) {
  const auto& node = run_.compiled.graph.nodes()[size_t(task.node)];
  auto& state = run_.nodes[size_t(task.node)];
  const auto& weights = run_.compiled.bodies[size_t(task.node)].weights;
  const bool trained = node.options.role == Role::Train;
  await_values(level, operation, task);
  auto saved = std::move(state.saved.front());
  state.saved.pop_front();
  // Of each output the sum of what its takers give back, in the order of the edges.
  Tensors sums(node.outputs.size());
  for (size_t i = 0; i < operation.takes.size(); ++i) {
    Tensors pieces;
    for (int64_t k = 0; k < operation.takes[i].count; ++k)
      pieces.push_back(arrive(take(level, operation.takes[i].channel),
                              run_.gradients[size_t(task.take_edges[i])], nullptr));
    const auto port = size_t(task.take_ports[i]);
    auto& sum = sums[port];
    try {
      const auto whole = pieces.size() == 1 ? pieces[0] : at::cat(pieces);
      sum = sum.defined() ? sum + whole : whole;
    } catch (...) {
      retell(cat("node '", node.name, "'"),
             cat("it was given ", describe(pieces), sum.defined() ? " to add to " : "",
                 sum.defined() ? describe(sum) : ""),
             cat(" on the way back, where gradients of output '", node.outputs[port].port.name,
                 "' are added"));
    }
  }
  const Time begin = clock_.now();
  Tensors roots, root_gradients, leaves, inputs;
  // What came as whole numbers has no gradient.
  Tensors given;
  for (const int port : task.give_ports)
    for (const auto& value : saved.inputs[size_t(port)]) {
      given.push_back(value);
      if (value.requires_grad()) leaves.push_back(value);
    }
  const size_t num_inputs = leaves.size();
  if (trained) leaves.insert(leaves.end(), weights.begin(), weights.end());
  for (const auto& values : saved.inputs) inputs.push_back(values[0]);
  Tensors found(leaves.size());
  guarded(task, inputs, [&] {
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const auto& output = saved.outputs[i];
      if (!output.requires_grad()) continue;
      if (node.outputs[i].port.name == node.options.loss) {
        const auto own = at::full_like(output, node.loss_part);
        sums[i] = sums[i].defined() ? sums[i] + own : own;
      }
      if (!sums[i].defined()) continue;
      roots.push_back(output);
      root_gradients.push_back(sums[i].to(output.scalar_type()));
    }
    if (!roots.empty())
      found = torch::autograd::grad(roots, leaves, root_gradients, /*retain_graph=*/false,
                                    /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = num_inputs; i < leaves.size(); ++i) {
      if (!found[i].defined()) continue;
      auto& gradient = leaves[i].mutable_grad();
      gradient = gradient.defined() ? gradient + found[i] : unshared(std::move(found[i]));
    }
  });
  state.figures.back_s += seconds(ended(name, observe::Category::Compute, begin) - begin);

  await_room(level, operation, task);
  size_t next = 0, leaf = 0;
  for (size_t i = 0; i < operation.gives.size(); ++i)
    for (int64_t k = 0; k < operation.gives[i].count; ++k, ++next) {
      auto& figures = run_.gradients[size_t(task.give_edges[i])].figures;
      at::Tensor gradient;
      if (given[next].requires_grad()) gradient = found[leaf++];
      Value value = leave(gradient.defined() ? gradient : at::zeros_like(given[next]));
      ++figures.values;
      figures.bytes += value.bytes();
      give(level, operation.gives[i].channel, std::move(value));
    }
}

void Walk::step(const Task& task, const char* name) {
  auto& state = run_.nodes[size_t(task.node)];
  const Time begin = clock_.now();
  guarded(task, {}, [&] { state.optimizer->step(); });
  for (const auto& weight : run_.compiled.bodies[size_t(task.node)].weights)
    weight.mutable_grad().reset();
  state.figures.step_s += seconds(ended(name, observe::Category::Compute, begin) - begin);
}

}  // namespace yoke::flow
