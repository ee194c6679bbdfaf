// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve null`: what the server costs where the model costs nothing, next to others.
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "yoke/base/error.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_server.h"
#include "yoke/serve/grpc_load.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;
constexpr int kRounds = 3;

struct Speed {
  double per_second = 0, p50_ms = 0, p99_ms = 0, cpu_us = 0;  // CPU of the server, a request
};

Speed median(std::vector<Speed> speeds) {
  std::ranges::sort(speeds, {}, &Speed::per_second);
  Speed result = speeds[speeds.size() / 2];
  std::ranges::sort(speeds, {}, &Speed::p99_ms);
  result.p99_ms = speeds[speeds.size() / 2].p99_ms;
  return result;
}

// One way to ask, of one server.
struct Contest {
  std::string name = {};
  BenchServer* server = nullptr;
  bool is_echo = false;  // whose answers mean nothing
  std::vector<Speed> speeds = {};
};

Speed measure(BenchTable& bench, const Contest& contest, const Doubling& asks, int connections) {
  auto user = user_of(asks);
  user.connections = connections;
  if (contest.is_echo) user.check = {};
  const auto run = [&](Duration length, Duration warm_up) {
    const serve::LoadOptions options{.to = contest.server->address(asks.grpc ? "grpc" : "http"),
                                     .warm_up = warm_up,
                                     .length = length};
    return (asks.grpc ? serve::run_grpc_load : serve::run_load)(options, {user})[0];
  };
  run(bench.length() / 20, {});
  const double before = contest.server->cpu_seconds();
  const auto report = run(bench.length() / kRounds, {});
  const double cpu = contest.server->cpu_seconds() - before;
  bench.wrong += report.wrong;
  if (report.failed() > 0 || report.requests == 0)
    fail(Kind::Internal, contest.name, " answered ", report.requests,
         " requests; in place of an answer came: ", serve::others_text(report));
  return {report.per_second(), report.percentile_ms(0.5), report.percentile_ms(0.99),
          cpu / double(report.requests) * 1e6};
}

fs::path peers_python() { return peers_folder() / "../../.deps/serving/bin/python"; }

std::unique_ptr<BenchServer> start_peer(const std::string& peer, const std::string& servers) {
  std::vector<std::string> command{peers_python().lexically_normal().string(),
                                   (peers_folder() / "serve.py").string(),
                                   peer,
                                   "--fast-queue",
                                   "--api-servers",
                                   servers};
  return std::make_unique<BenchServer>(command);
}

void write_double(const fs::path& path) {
  torch::jit::Module model("double");
  model.define("def forward(self, x):\n  return 2 * x\n");
  model.save(path.string());
}

std::vector<std::pair<std::string, double>> more_of(const Speed& speed) {
  return {{"p50_ms", speed.p50_ms}, {"p99_ms", speed.p99_ms}, {"server_cpu_us", speed.cpu_us}};
}

// Of every peer five times the throughput and a third of its p99; half of the faster echo.
void report_aims(BenchTable& bench, const std::string& way, const std::vector<Contest>& contests) {
  const Speed ours = median(contests[0].speeds);
  double echo = 0;
  for (const auto& contest : contests) {
    if (&contest == &contests[0]) continue;
    const Speed speed = median(contest.speeds);
    if (contest.is_echo) {
      echo = std::max(echo, speed.per_second);
      continue;
    }
    bench.report({.bench = "null",
                  .what = cat(way, ", of ", contest.name, "'s throughput"),
                  .unit = "x",
                  .got = ours.per_second / speed.per_second,
                  .least = 5});
    bench.report({.bench = "null",
                  .what = cat(way, ", of ", contest.name, "'s p99"),
                  .unit = "x",
                  .got = ours.p99_ms / speed.p99_ms,
                  .most = 1.0 / 3});
  }
  bench.report({.bench = "null",
                .what = cat(way, ", of the faster echo's throughput"),
                .unit = "x",
                .got = ours.per_second / echo,
                .least = 0.5});
}

}  // namespace

void bench_null(BenchTable& bench) {
  const Scratch scratch;
  write_double(scratch.path() / "double.pt");
  YokeServer yoke(cat("\n[[model]]\nname = \"double\"\npath = \"",
                      (scratch.path() / "double.pt").string(),
                      "\"\ndevices = \"cpu\"\nbatch = 16\ninput = [\"x:FP32[-1,16]\"]\n"
                      "output = [\"y:FP32[-1,16]\"]\n"));
  size_t answer_bytes = 0;
  auto probe = user_of({.model = "double", .width = 16, .wire = serve::Wire::Json});
  probe.count = 1;
  probe.check = [&](uint64_t, const serve::LoadAnswer& answer) {
    answer_bytes = answer.body.size();
    return answer.status == 200;
  };
  serve::run_load({.to = yoke->http(), .warm_up = {}}, {probe});
  const auto echo = [&](int threads) {
    return std::make_unique<BenchServer>(std::vector<std::string>{own_program(), "bench", "serve",
                                                                  "--echo-bytes", cat(answer_bytes),
                                                                  "--echo-threads", cat(threads)});
  };
  std::vector<std::pair<std::string, std::unique_ptr<BenchServer>>> others;
  others.emplace_back("echo, 1 thread", echo(1));
  others.emplace_back("echo, 2 threads", echo(2));
  for (const auto& peer : bench.peers) {
    if (!fs::exists(peers_python())) {
      bench.skip("null", peer, cat(peers_python().string(), " is not there; see bench/peers"));
      continue;
    }
    try {
      others.emplace_back(peer, start_peer(peer, "1"));
      if (peer == "litserve") others.emplace_back(peer + ", 2 API servers", start_peer(peer, "2"));
    } catch (const Error& error) {
      bench.skip("null", peer, error.what());
    }
  }

  struct Way {
    std::string name;
    Doubling asks;
    int connections;
    bool aimed_at = false;
  };
  std::vector<Way> ways;
  for (const int connections : {1, 16}) {
    const Doubling json{.model = "double", .width = 16, .wire = serve::Wire::Json};
    Doubling binary = json, grpc = json;
    binary.wire = serve::Wire::Binary;
    grpc.grpc = true;
    ways.push_back({cat("JSON x", connections), json, connections, connections == 16});
    ways.push_back({cat("binary x", connections), binary, connections});
    if (serve::has_grpc_load()) ways.push_back({cat("gRPC x", connections), grpc, connections});
  }
  yoke->pause();
  for (const auto& [name, server] : others) server->pause();
  for (const auto& way : ways) {
    std::vector<Contest> contests{{.name = "yoke", .server = &*yoke}};
    for (const auto& [name, server] : others) {
      if (way.asks.grpc && !server->has("grpc")) continue;
      if (name.starts_with("litserve") && way.asks.wire == serve::Wire::Binary) continue;
      contests.push_back({name, server.get(), name.starts_with("echo")});
    }
    for (int round = 0; round < kRounds; ++round)
      for (auto& contest : contests) {
        contest.server->resume();
        contest.speeds.push_back(measure(bench, contest, way.asks, way.connections));
        contest.server->pause();  // some are busy while nobody asks them
      }
    const Speed ours = median(contests[0].speeds);
    for (const auto& contest : contests) {
      const Speed speed = median(contest.speeds);
      auto more = more_of(speed);
      if (&contest != &contests[0]) {
        more.emplace_back("our_throughput_ratio", ours.per_second / speed.per_second);
        more.emplace_back("our_p99_ratio", ours.p99_ms / speed.p99_ms);
      }
      bench.report({.bench = "null",
                    .what = cat(way.name, ", ", contest.name),
                    .unit = "/s",
                    .got = speed.per_second,
                    .more = more});
    }
    if (way.aimed_at) report_aims(bench, way.name, contests);
  }
}

}  // namespace yoke::cli
