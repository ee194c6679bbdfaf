// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve replicas`: whether replicas add up. They sleep, so that it takes no devices.
#include <algorithm>

#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_server.h"
#include "yoke/serve/grpc_load.h"

namespace yoke::cli {
namespace {

double throughput(BenchTable& bench, const std::string& how, int replicas,
                  const std::string& stream = {}) {
  YokeServer server(stand_in_model("m", how, replicas));
  auto user = user_of({.stream = stream});
  user.connections = 8 * replicas;
  const auto report = serve::run_load({.to = server->http(), .length = bench.length()}, {user})[0];
  bench.wrong += report.wrong + report.failed();
  return report.per_second();
}

struct Job {
  Time arrival = {};
  Duration took = {};  // of its service alone
};

// The best there is: one queue, whose first goes to the first server that is free.
serve::LoadReport ideal_queue(std::vector<Job> jobs, int servers) {
  std::ranges::sort(jobs, {}, &Job::arrival);
  std::vector<Time> free_at(size_t(servers), Time{});
  serve::LoadReport report;
  for (const auto& job : jobs) {
    auto& first = *std::ranges::min_element(free_at);
    first = std::max(job.arrival, first) + job.took;
    report.latencies.push_back(first - job.arrival);
  }
  std::ranges::sort(report.latencies);
  return report;
}

// Every request brings its own service time, so that the ideal queue has the same work to do.
void bench_open_loop(BenchTable& bench, bool grpc) {
  constexpr int kReplicas = 8;
  constexpr double kMs = 10, kValueMs = 0.02, kMeanMs = kMs + kValueMs * 512;
  YokeServer server(stand_in_model("m", cat("ms=", kMs, ",value_ms=", kValueMs), kReplicas));
  auto user = user_of({.grpc = grpc});
  user.rate = 0.9 * kReplicas / (kMeanMs / 1e3);
  user.connections = 1000;
  std::vector<Job> jobs;
  user.check = [&, check = user.check](uint64_t number, const serve::LoadAnswer& answer) {
    serve::Question question;
    serve::fill(question, number, {1, 4});
    const double ms = kMs + kValueMs * double(question.values[0]);
    jobs.push_back({answer.due, Duration(int64_t(ms * 1e6))});
    return check(number, answer);
  };
  const serve::LoadOptions options{
      .to = server->address(grpc ? "grpc" : "http"), .warm_up = {}, .length = 2 * bench.length()};
  const auto report = (grpc ? serve::run_grpc_load : serve::run_load)(options, {user})[0];
  bench.wrong += report.wrong + report.failed();
  const auto ideal = ideal_queue(jobs, kReplicas);
  bench.report({.bench = "replicas",
                .what = cat("p99 of 8 at 90 % load, of an ideal queue's", grpc ? ", gRPC" : ""),
                .unit = "x",
                .got = report.percentile_ms(0.99) / ideal.percentile_ms(0.99),
                .most = 1.15,
                .more = {{"p50_ms", report.percentile_ms(0.5)},
                         {"p99_ms", report.percentile_ms(0.99)},
                         {"ideal_p50_ms", ideal.percentile_ms(0.5)},
                         {"ideal_p99_ms", ideal.percentile_ms(0.99)},
                         {"requests", double(report.requests)}}});
}

}  // namespace

void bench_replicas(BenchTable& bench) {
  const std::string how = "ms=10";
  const double one = throughput(bench, how, 1), two = throughput(bench, how, 2);
  bench.report({.bench = "replicas",
                .what = "2 replicas, of one's throughput",
                .unit = "x",
                .got = two / one,
                .least = 1.95,
                .more = {{"one_per_s", one}, {"two_per_s", two}}});
  const double stream = throughput(bench, how, 4, "s");
  bench.report({.bench = "replicas",
                .what = "one stream in order over 4, of one's",
                .unit = "x",
                .got = stream / one,
                .least = 3.8,
                .more = {{"per_s", stream}}});
  bench_open_loop(bench, false);
  if (serve::has_grpc_load())
    bench_open_loop(bench, true);
  else
    bench.skip("replicas", "90 % load over gRPC", "this build has no gRPC");
  const double slowed = throughput(bench, how + ",first_times=2", 4);
  bench.report({.bench = "replicas",
                .what = "4, one of them half as fast, of the sum",
                .unit = "x",
                .got = slowed / (3.5 * one),
                .least = 0.95,
                .more = {{"per_s", slowed}}});
}

}  // namespace yoke::cli
