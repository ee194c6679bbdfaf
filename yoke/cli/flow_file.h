// SPDX-License-Identifier: Apache-2.0
// A flow as the verbs of `yoke flow` are given it: its file, what overrides keys of it, and values
// for its inputs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "yoke/flow/config.h"
#include "yoke/flow/executor.h"

namespace yoke::cli {

struct FlowFile {
  std::string path = {};  // or a folder with a flow.toml
  std::vector<std::string> overrides = {}, inputs = {};
  std::optional<int64_t> rounds = {};  // instead of flow.rounds
};

flow::Config read_flow(const FlowFile& file);  // on this host
// What is wrong is told with the file.
flow::Compiled compile_flow(const FlowFile& file, const flow::Graph& graph);
// "x=1,2;3,4": rows with semicolons, as the port's datatype; one for each input, in their order.
flow::Tensors parse_inputs(const std::vector<std::string>& inputs, const flow::Executor& executor);

}  // namespace yoke::cli
