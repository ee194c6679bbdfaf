// SPDX-License-Identifier: Apache-2.0
// A flow as a TOML file: sections of nodes, edges and patterns, with the words of graph.h.
#pragma once

#include <filesystem>

#include "yoke/flow/graph.h"

namespace yoke::flow {

struct FlowConfig {
  std::string name = "flow", devices = "auto";
  int64_t rounds = 100, seed = 1, log_every = 0, threads = 0;
  double timeout_s = 300, memory_gb = 0;
};

struct Config {
  FlowConfig flow = {};
  Graph graph = Graph();
};

// A file, or a folder with a flow.toml. Paths in it are relative to its folder. `host`: what
// devices there are; null: not asked. Throws Kind::Config.
Config read_config(const std::filesystem::path& path,
                   const std::vector<std::string>& overrides = {},
                   const topo::Host* host = nullptr);
bool is_flow(const std::filesystem::path& path);
std::string describe_keys();

}  // namespace yoke::flow
