// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/flow_model.h"

#include <algorithm>
#include <climits>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/config.h"
#include "yoke/topo/host.h"

namespace yoke::runner {

namespace {

std::string devices_of(const std::string& folder, const flow::Config& config,
                       const FlowModel::Where& where, const topo::Host& host) {
  if (config.flow.devices == "auto") return where.device.is_cuda() ? where.device.str() : "cpu";
  const auto devices = replica_devices(config.graph.options().devices, where.replica);
  for (const auto& device : devices)
    if (device.kind == topo::DeviceKind::Cuda && device.index >= int(host.gpus.size()))
      fail(Kind::Config, "'", folder, "': replica ", where.replica, " of a flow on ",
           config.flow.devices, " wants ", topo::to_text(device), ", and there are ",
           host.gpus.size(), " GPUs; take fewer replicas");
  return topo::to_text(devices);
}

}  // namespace

std::vector<topo::Device> replica_devices(std::vector<topo::Device> named, int64_t replica) {
  int first = INT_MAX, last = -1;
  for (const auto& device : named) {
    if (device.kind != topo::DeviceKind::Cuda) continue;
    first = std::min(first, device.index);
    last = std::max(last, device.index);
  }
  for (auto& device : named)
    if (device.kind == topo::DeviceKind::Cuda) device.index += int(replica) * (last - first + 1);
  return named;
}

FlowModel::FlowModel(const std::string& folder, const Where& where, const topo::Host& host)
    : Loadable(folder, "yoke_flow") {
  auto config = flow::read_config(folder, {}, &host);
  const auto devices = devices_of(folder, config, where, host);
  if (devices != config.flow.devices)
    config = flow::read_config(folder, {cat("flow.devices=", devices)}, &host);
  for (const auto& node : config.graph.nodes())
    if (node.options.role == flow::Role::Train)
      fail(Kind::Config, "'", folder, "': node '", node.name,
           "' is trained; a flow that is served ", "has roles infer and frozen");
  auto compiled = flow::compile(std::move(config.graph));
  const int queues = int(compiled.program.queues.size());
  for (const auto& edge : compiled.graph.edges())
    if (edge.options.staleness > 0 || edge.options.every > 1 ||
        edge.options.policy != flow::Policy::Block)
      fail(Kind::Config, "'", folder, "': the edge from '",
           compiled.graph.nodes()[size_t(edge.from)].name, "' to '",
           compiled.graph.nodes()[size_t(edge.to)].name,
           "' keeps values from round to round, so that one request would find another's; a flow "
           "that is served has no staleness, every, latest or drop");
  for (const auto& region : compiled.graph.regions())
    if (region.decides.first >= 0) decider_ = region.name;
  for (const auto& body : compiled.bodies) {
    bytes_ += body.bytes;
    has_package_ = has_package_ || body.compiled;
  }
  executor_ = std::make_unique<flow::Executor>(
      std::move(compiled),
      flow::RunOptions{.timeout = std::chrono::duration_cast<Duration>(
                           std::chrono::duration<double>(config.flow.timeout_s)),
                       .threads_per_queue = std::max(1, where.threads / queues)});
  inputs_ = executor_->input_ports();
  outputs_ = executor_->output_ports();
  if (inputs_.empty() || outputs_.empty())
    fail(Kind::Config, "'", folder,
         "': a flow that is served has inputs and outputs: sections [[input]] and [[output]]");
  declared_ = std::ranges::none_of(inputs_, [](const auto& port) { return port.shape.empty(); });
  if (std::ranges::any_of(outputs_, [](const auto& port) { return port.shape.empty(); }))
    outputs_.clear();
}

c10::IValue FlowModel::call(std::vector<c10::IValue> inputs) {
  flow::Tensors values;
  for (auto& input : inputs) values.push_back(input.toTensor());
  auto outputs = executor_->step(values);
  executor_
      ->wait();  // nobody reads the inputs any more, and nodes beside the outputs' way have been
  c10::List<at::Tensor> list(outputs);
  return outputs.size() == 1 ? c10::IValue(outputs[0]) : c10::IValue(list);
}

std::string FlowModel::breakdown() const {
  nlohmann::ordered_json nodes = nlohmann::ordered_json::array();
  if (!executor_->done()) return {};  // a round that failed
  for (const auto& node : executor_->report().nodes)
    nodes.push_back({{"name", node.name},
                     {"queue", node.queue},
                     {"count", node.firings},
                     {"compute_ns", int64_t(node.compute_s * 1e9)},
                     {"wait_ns", int64_t(node.wait_s * 1e9)}});
  return nodes.dump();
}

}  // namespace yoke::runner
