// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve order`, `isolation`, `drain`: what must hold while things go wrong.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_server.h"
#include "yoke/serve/grpc_load.h"

namespace yoke::cli {
namespace {

using namespace std::chrono_literals;

uint64_t count_of(const serve::LoadReport& report, std::initializer_list<int> statuses) {
  uint64_t sum = 0;
  for (const int status : statuses)
    if (const auto found = report.others.find(status); found != report.others.end())
      sum += found->second;
  return sum;
}

}  // namespace

// One stream over replicas of random speed. Some questions fail, some have no time, and others of
// the same stream are left by their clients.
void bench_order(BenchTable& bench) {
  constexpr uint64_t kCount = 10'000;
  if (!serve::has_grpc_load())
    return bench.skip("order", "a stream", "this build has no gRPC, whose streams have an order");
  YokeServer server(stand_in_model("m", "jitter_ms=50", 8, 4));
  uint64_t next = 0, out_of_order = 0, failed = 0, in_time = 0, wrong = 0;
  std::atomic<bool> over{false};
  serve::LoadReport left;
  {
    const std::jthread leavers([&] {
      while (!over) {
        auto user = user_of({.seed = 1, .stream = "order", .leave_after = 3ms});
        user.connections = 2;
        left.add(serve::run_load({.to = server->http(), .warm_up = {}, .length = 1s}, {user})[0]);
      }
    });
    const Rng rng(1, "order");
    const auto fails = [&](uint64_t number) { return rng.below(number, 50) == 0; };
    uint64_t came = 0;
    try {
      came = serve::run_grpc_stream(
          server->address("grpc"), kCount, 64, 60s,
          [&](uint64_t number, serve::Question& question) {
            question.model = std::string("m");
            question.id = std::to_string(number);
            question.stream = std::string("order");
            serve::fill(question, number, {1, 4});
            if (fails(number)) question.values[0] = -1;
            question.timeout_us = rng.below(kCount + number, 20) == 0 ? 10'000 : 0;
          },
          [&](const std::string& id, const std::string& error, std::span<const float> values) {
            const auto number = uint64_t(parse_int(id).value_or(-1));
            out_of_order += number != next++;
            if (!error.empty()) return void(++failed);
            serve::Question question;
            serve::fill(question, number, {1, 4});
            wrong += fails(number) || values.size() != 4 || values[1] != 2 * question.values[1];
            ++in_time;
          });
    } catch (...) {
      over = true;
      throw;
    }
    over = true;
    out_of_order += kCount - came;
  }
  bench.wrong += wrong + left.wrong;
  bench.report({.bench = "order",
                .what = cat("of ", kCount, " in one stream: lost or out of order"),
                .got = double(out_of_order),
                .most = 0,
                .more = {{"failed_or_late", double(failed)},
                         {"left_by_clients", double(count_of(left, {serve::kLeft}))}}});
  // A fiftieth fails, a twentieth has too little time.
  bench.report({.bench = "order",
                .what = cat("of ", kCount, " in one stream: answered well"),
                .got = double(in_time),
                .least = 0.9 * kCount});
  bench.wrong += out_of_order;
}

// Rows that only their tenant knows, in batches of all, while workers die.
void bench_isolation(BenchTable& bench) {
  constexpr uint64_t kRows = 1'000'000;
  constexpr int64_t kMostRows = 16;
  std::string config = stand_in_model("m", "ms=1", 4, 32);
  std::vector<serve::LoadUser> users;
  for (const std::string name : {"a", "b", "c"}) {
    config += "\n[[tenant]]\nname = \"" + name + "\"\n";
    users.push_back(user_of({.most_rows = kMostRows, .seed = uint64_t(name[0]), .tenant = name}));
    users.back().connections = 8;
    // And a hundredth more: some are lost with two workers.
    users.back().count = kRows / 3 * 2 / (kMostRows + 1) * 101 / 100;
  }
  YokeServer server(config, "poison = true\n");
  int killed = 0;
  std::vector<serve::LoadReport> reports;
  {
    const std::jthread killer([&](const std::stop_token& stop) {
      const Rng rng(1, "kills");
      Time next = SteadyClock().now() + 2s;
      while (!stop.stop_requested()) {
        std::this_thread::sleep_for(20ms);
        if (SteadyClock().now() < next) continue;
        next += 2s;
        try {
          const auto pids = server.worker_pids();
          if (!pids.empty() && ::kill(pids[rng.below(uint64_t(killed), pids.size())], SIGKILL) == 0)
            ++killed;
        } catch (const Error&) {  // the server is asked again
        }
      }
    });
    reports = serve::run_load({.to = server->http(), .warm_up = {}, .length = 300s}, users);
  }
  serve::LoadReport all;
  for (const auto& report : reports) all.add(report);
  bench.wrong += all.wrong;
  bench.report({.bench = "isolation",
                .what = "answers with rows of others",
                .got = double(all.wrong),
                .most = 0});
  bench.report({.bench = "isolation",
                .what = "rows that were right",
                .got = double(all.rows),
                .least = double(kRows),
                .more = {{"seconds", all.seconds}}});
  bench.report({.bench = "isolation",
                .what = "workers that were killed",
                .got = double(killed),
                .least = std::max(1.0, all.seconds / 4)});  // half of those that were due
  bench.report({.bench = "isolation",
                .what = "requests without an answer",
                .got = double(count_of(all, {serve::kBroken, serve::kLate, serve::kRefused})),
                .most = 0,
                .more = {{"other_failures", double(all.failed())}}});
}

void bench_drain(BenchTable& bench) {
  constexpr int kReplicas = 4, kBatch = 2, kSecondsBefore = 2;
  constexpr double kLeast =
      0.5 * kSecondsBefore * kReplicas * kBatch / 20e-3;  // half of what they can
  YokeServer server(stand_in_model("m", "ms=20", kReplicas, kBatch));
  auto user = user_of({});
  user.connections = 64;
  // Whatever is sent after a first refusal was seen cannot have been accepted.
  Time refused = Time::max();
  uint64_t accepted_lost = 0, cut_off = 0;
  user.check = [&, check = user.check](uint64_t number, const serve::LoadAnswer& answer) {
    if (answer.status == 503) refused = std::min(refused, answer.done);
    const bool is_refusal = answer.status == 503 || answer.status == serve::kRefused;
    if (answer.status != 200 && !is_refusal) ++(answer.due > refused ? cut_off : accepted_lost);
    return check(number, answer);
  };
  serve::LoadReport report;
  std::optional<int> exit_code;
  double seconds = 0;
  {
    const std::jthread ender([&] {
      std::this_thread::sleep_for(std::chrono::seconds(kSecondsBefore));
      const Time begin = SteadyClock().now();
      server->signal(SIGTERM);
      exit_code = server->wait(40s);
      seconds = std::chrono::duration<double>(SteadyClock().now() - begin).count();
    });
    report = serve::run_load({.to = server->http(), .warm_up = {}, .length = 6s}, {user})[0];
  }
  bench.wrong += report.wrong;
  bench.report({.bench = "drain",
                .what = "accepted requests that failed",
                .got = double(accepted_lost),
                .most = 0,
                .more = {{"refused", double(count_of(report, {503, serve::kRefused}))},
                         {"cut_off_after_a_refusal", double(cut_off)}}});
  bench.report({.bench = "drain",
                .what = "requests answered well",
                .got = double(report.requests),
                .least = kLeast});
  bench.report({.bench = "drain",
                .what = "exit code",
                .got = double(exit_code.value_or(-1)),
                .least = 0,
                .most = 0,
                .more = {{"seconds", seconds}}});
}

}  // namespace yoke::cli
