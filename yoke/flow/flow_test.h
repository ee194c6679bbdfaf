// SPDX-License-Identifier: Apache-2.0
// What the tests of flows share: small bodies, graphs on the device under test, and errors as
// texts.
#pragma once

#include <ATen/Functions.h>

#include <cstdlib>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/executor.h"
#include "yoke/flow/words.h"

namespace yoke::flow {

// The same flows on a GPU that their queues share, where one is named.
inline const char* const kGpu = std::getenv("YOKE_TEST_DEVICE");

inline Graph graph_on(const std::string& devices) {
  if (kGpu == nullptr) return Graph({.devices = topo::parse_devices(devices)});
  const std::string count = devices == "cpu" ? "1" : devices.substr(4);
  return Graph({.devices = topo::parse_devices(cat(kGpu, "x", count))});
}
inline const double kClose = kGpu ? 1e-4 : 1e-6;  // a GPU sums in another order

inline Open word(const std::string& text, const std::string& key = "key") {
  return find_word(text, 1, key)->open;
}

// A node of a word, with its ports.
inline void add(Graph& graph, const std::string& name, const std::string& text,
                NodeOptions options = {}, const std::string& key = "") {
  const auto found = find_word(text, 1, key.empty() ? name : key);
  if (options.inputs.empty()) options.inputs = found->inputs;
  if (options.outputs.empty()) options.outputs = found->outputs;
  options.loss = found->loss;
  graph.node(name, found->open, options);
}

inline Open plus(double by) {
  return function([by](const Tensors& in) { return in[0] + by; });
}

// 1, 2, 3, … in each round.
inline Open counts() {
  return function(Function([](const Tensors&, int64_t firing) -> Tensors {
    return {at::full({1}, double(firing + 1))};
  }));
}

inline double number(const at::Tensor& value) { return value.reshape({-1})[0].item<double>(); }

inline std::string error_of(const auto& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// What its only output gives, round after round.
inline std::vector<double> outputs_of(const Graph& graph, int64_t rounds, RunOptions options = {}) {
  Executor executor(compile(graph), options);
  std::vector<double> result;
  for (int64_t i = 0; i < rounds; ++i) {
    executor.run(1);
    result.push_back(number(executor.last()[0]));
  }
  return result;
}

}  // namespace yoke::flow
