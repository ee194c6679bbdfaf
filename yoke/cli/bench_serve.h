// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve`: the server under load, next to peers and to what is ideal. The server is this
// program in another process. Every answer is verified; a figure has a target where there is one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/serve/load_wire.h"

namespace CLI {
class App;
}

namespace yoke::cli {

struct Figure {
  std::string bench = {}, what = {}, unit = {};
  double got = 0;
  std::optional<double> least = {}, most = {};  // the target
  std::vector<std::pair<std::string, double>> more = {};
  bool passed() const { return (!least || got >= *least) && (!most || got <= *most); }
};

struct BenchServe {
  std::vector<std::string> peers = {};
  double seconds = 10;  // of a measurement
  bool json = false;
  uint64_t wrong = 0;  // answers, of all

  Duration length() const { return Duration(int64_t(seconds * 1e9)); }
  void report(const Figure& figure);
  void skip(const std::string& bench, const std::string& what, const std::string& why) const;
};

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

void bench_null(BenchServe& bench);
void bench_resnet(BenchServe& bench);
void bench_replicas(BenchServe& bench);
void bench_fair(BenchServe& bench);
void bench_order(BenchServe& bench);
void bench_isolation(BenchServe& bench);
void bench_drain(BenchServe& bench);

// Answers every request with so many bytes, until SIGTERM; its address is in the file.
void run_echo(const std::string& port_file, size_t bytes, int num_threads);

void add_bench_serve(CLI::App& bench);

}  // namespace yoke::cli
