// SPDX-License-Identifier: Apache-2.0
// Two replicas of a model within this program, shared by two tenants: what `yoke serve` has behind
// its protocols, with threads in place of worker processes.
#include <torch/script.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <future>
#include <iostream>

#include "yoke/yoke.h"

namespace serve = yoke::serve;

int main() {
  torch::jit::Module net("net");
  net.define("def forward(self, x):\n    return x.cumsum(1)\n");
  const auto path =
      std::filesystem::temp_directory_path() / ("yoke_net_" + std::to_string(::getpid()) + ".pt");
  net.save(path.string());

  const serve::OpenRunner open = [](const serve::ReplicaSpec& spec) {
    return yoke::runner::open_runner(spec);
  };
  yoke::observe::Registry metrics;
  serve::Pool pool({.workers = {.open = open}}, yoke::observe::Log(), metrics);
  pool.load({.name = "net", .path = path.string(), .devices = "cpu:2", .input = {"x:FP32[-1,4]"}});
  pool.set_tenants({{.name = "ann", .guaranteed = 0.7}, {.name = "bob"}});
  pool.wait_ready(std::chrono::minutes(1));

  // Rows of several requests are computed together as soon as a replica is free.
  std::vector<std::future<serve::Answer>> answers;
  for (int i = 0; i < 6; ++i) {
    const auto row = std::make_shared<std::array<float, 4>>();
    row->fill(float(i));
    const std::string_view data(reinterpret_cast<const char*>(row->data()), sizeof(*row));
    const auto answer = std::make_shared<std::promise<serve::Answer>>();
    answers.push_back(answer->get_future());
    serve::Request request{.model = "net"};
    request.inputs = {{.name = "x", .type = serve::Type::Fp32, .shape = {1, 4}, .data = data}};
    request.holds = {row};
    request.parameters.timeout = std::chrono::seconds(10);
    pool.submit(std::move(request), pool.tenant(i % 2 ? "bob" : "ann"),
                [answer](serve::Answer given) { answer->set_value(std::move(given)); });
  }
  for (auto& each : answers) {
    const auto answer = each.get();
    if (!answer.outcome.ok()) throw std::runtime_error(answer.outcome.text);
    const auto* sums = reinterpret_cast<const float*>(answer.outputs[0].data.data());
    std::cout << "replica " << answer.replica << ": " << sums[0] << " … " << sums[3] << "\n";
  }
  for (const auto& tenant : pool.view().tenants)
    std::cout << tenant.name << ": " << tenant.device_s << " device seconds\n";
  std::filesystem::remove(path);
}
