// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve`: the server under load, next to peers and to what is ideal. The server is this
// program in another process. Every answer is verified; a figure has a target where there is one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "yoke/cli/bench_table.h"
#include "yoke/serve/load_wire.h"

namespace CLI {
class App;
}

namespace yoke::cli {

// A user who asks a model that gives twice what it gets, and looks at every value of every answer.
struct Doubling {
  std::string model = "m";
  int64_t width = 4, most_rows = 1;
  serve::Wire wire = serve::Wire::Binary;
  bool grpc = false;  // in place of it
  uint64_t seed = 0;  // of its values, which nobody else has
  std::string tenant = {}, stream = {};
  Duration leave_after = {};
};
serve::LoadUser user_of(const Doubling& doubling);

void bench_null(BenchTable& bench);
void bench_resnet(BenchTable& bench);
void bench_replicas(BenchTable& bench);
void bench_fair(BenchTable& bench);
void bench_order(BenchTable& bench);
void bench_isolation(BenchTable& bench);
void bench_drain(BenchTable& bench);

// Answers every request with so many bytes, until SIGTERM; its address is in the file.
void run_echo(const std::string& port_file, size_t bytes, int num_threads);

void add_bench_serve(CLI::App& bench);

}  // namespace yoke::cli
