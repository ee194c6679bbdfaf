// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve order`, `isolation`, `drain`: what must hold while things go wrong.
#include <signal.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
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

constexpr const char* kStream = "order";

uint64_t count_of(const serve::LoadReport& report, std::initializer_list<int> statuses) {
  uint64_t sum = 0;
  for (const int status : statuses)
    if (const auto found = report.others.find(status); found != report.others.end())
      sum += found->second;
  return sum;
}

// Who asks the same question again and again of replicas of random speed, and leaves before it is
// answered, while `run` goes on.
serve::LoadReport beside_leavers(const net::Address& to, const std::function<void()>& run) {
  serve::LoadReport left;
  std::exception_ptr problem;
  {
    const std::jthread leavers([&](const std::stop_token& stop) {
      try {
        auto user = user_of({.seed = 1, .stream = kStream, .leave_after = 3ms});
        user.connections = 2;
        while (!stop.stop_requested())
          left.add(serve::run_load({.to = to, .warm_up = {}, .length = 200ms}, {user})[0]);
      } catch (...) {
        problem = std::current_exception();
      }
    });
    run();
  }
  if (problem) std::rethrow_exception(problem);
  return left;
}

// Questions of which a fiftieth fails and a twentieth has too little time, and their answers in the
// order in which they come.
class Series {
 public:
  explicit Series(uint64_t count) : count(count) {}

  void ask(uint64_t number, const std::string& stream, serve::Question& question) const {
    question.model = std::string("m");
    question.id = std::to_string(number);
    question.stream = stream;
    serve::fill(question, number, {1, 4});
    if (fails(number)) question.values[0] = -1;
    question.timeout_us = is_hurried(number) ? 10'000 : 0;
  }

  void take(uint64_t number, std::string_view error, std::span<const float> values) {
    disordered += number != came++;
    if (error.empty()) {
      serve::Question question;
      serve::fill(question, number, {1, 4});
      ++well;
      wrong += fails(number) ||
               !std::ranges::equal(values, question.values, {}, {}, [](float x) { return 2 * x; });
    } else if (is_hurried(number) && error.find("timeout of") != error.npos) {
      ++late;
    } else {
      ++failed;
      wrong += !fails(number) || error.find("begins with -1") == error.npos;
    }
  }

  const uint64_t count;
  uint64_t came = 0, disordered = 0, well = 0, late = 0, failed = 0, wrong = 0;

 private:
  bool fails(uint64_t number) const { return rng_.below(number, 50) == 0; }
  bool is_hurried(uint64_t number) const { return rng_.below(count + number, 20) == 0; }

  const Rng rng_{1, "order"};
};

constexpr uint64_t kAtOnce = 64;

void ask_by_grpc(Series& series, BenchServer& server) {
  serve::run_grpc_stream(
      server.address("grpc"), series.count, kAtOnce, 60s,
      [&](uint64_t number, serve::Question& question) { series.ask(number, "", question); },
      [&](const std::string& id, const std::string& error, std::span<const float> values) {
        series.take(uint64_t(parse_int(id).value_or(0)), error, values);
      });
}

auto writer(const Series& series, const std::string& stream) {
  return [&series, stream](uint64_t number, serve::LoadRequest& request) {
    serve::Question question;
    series.ask(number, stream, question);
    serve::write_question(question, serve::Wire::Json, request);
  };
}

void take(Series& series, uint64_t number, const serve::LoadAnswer& answer) {
  std::array<float, 4> values{};
  if (answer.status != 200)
    series.take(number, answer.body.empty() ? "nothing was said" : answer.body, {});
  else if (serve::read_values(answer.body, serve::Wire::Json, values))
    series.take(number, {}, values);
  else
    series.take(number, {}, {});
}

void ask_by_pipeline(Series& series, BenchServer& server) {
  serve::run_pipeline(server.http(), series.count, kAtOnce, 60s, writer(series, ""),
                      [&](const serve::LoadAnswer& answer) {
                        constexpr std::string_view kId = "\"id\":\"";
                        const size_t at = answer.body.find(kId);
                        uint64_t number = series.came;  // an error has no id
                        if (at != answer.body.npos)
                          std::from_chars(answer.body.data() + at + kId.size(),
                                          answer.body.data() + answer.body.size(), number);
                        take(series, number, answer);
                      });
}

// Of two connections a busy host may swap what is sent at nearly the same time: what counts is who
// asked long before another and was answered long after it.
void ask_by_parameter(Series& series, BenchServer& server) {
  constexpr auto kLong = 10ms;
  struct Seen {
    Time due, done;
  };
  std::vector<Seen> seen;
  size_t num_before = 0;  // that were answered long before
  Time latest = {};       // that one of them was asked
  uint64_t overtaken = 0;
  serve::LoadUser user{.connections = int(kAtOnce), .count = series.count};
  user.make = writer(series, kStream);
  user.check = [&](uint64_t number, const serve::LoadAnswer& answer) {
    if (answer.status <= 0) return true;
    take(series, number, answer);
    seen.push_back({answer.due, answer.done});
    for (; seen[num_before].done + kLong < answer.done; ++num_before)
      latest = std::max(latest, seen[num_before].due);
    overtaken += answer.due + kLong < latest;
    return true;
  };
  serve::run_load({.to = server.http(), .warm_up = {}, .length = 60s}, {user});
  series.disordered = overtaken;
}

}  // namespace

// Streams over replicas of random speed, each kind by itself: what comes over one connection is put
// in order by its front, a named stream by the pool. One thread reads all connections, and hears
// them in the order in which they ask.
void bench_order(BenchTable& bench) {
  struct Way {
    std::string name;
    void (*ask)(Series& series, BenchServer& server);
  };
  std::vector<Way> ways{{"one HTTP connection", ask_by_pipeline},
                        {"one yoke_stream", ask_by_parameter}};
  if (serve::has_grpc_load())
    ways.push_back({"one gRPC stream", ask_by_grpc});
  else
    bench.skip("order", "one gRPC stream", "this build has no gRPC");
  for (const auto& way : ways) {
    YokeServer server(stand_in_model("m", "jitter_ms=50", 8, 4), "threads = 1\n");
    Series series(std::min<uint64_t>(10'000, uint64_t(2000 * bench.seconds)));
    const auto left = beside_leavers(server->http(), [&] { way.ask(series, *server); });
    const double leavers = double(count_of(left, {serve::kLeft}));
    const std::string what = cat(series.count, " in ", way.name);
    const uint64_t lost = series.count - std::min(series.came, series.count);
    bench.wrong += series.wrong + left.wrong + lost + series.disordered;
    bench.report({.bench = "order",
                  .what = cat(what, ": lost or out of order"),
                  .got = double(lost + series.disordered),
                  .most = 0});
    // A fiftieth fails, a twentieth has too little time.
    bench.report({.bench = "order",
                  .what = cat(what, ": answered well"),
                  .got = double(series.well),
                  .least = 0.9 * double(series.count)});
    bench.report({.bench = "order",
                  .what = cat(what, ": failed, late, left"),
                  .got = std::min({double(series.failed), double(series.late), leavers}),
                  .least = 1,
                  .more = {{"failed", double(series.failed)},
                           {"late", double(series.late)},
                           {"left_by_clients", leavers}}});
  }
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
    // And a hundredth more, as not all have the same number of rows.
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
        next = SteadyClock().now() + 2s;  // what is tried again is never killed again
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
                .most = 0});
  bench.report({.bench = "isolation",
                .what = "requests that failed with a worker",
                .got = double(all.failed()),
                .most = 0});
  // Tenants take turns, so two of a batch are of two.
  const auto stats = nlohmann::json::parse(server.get("/v2/models/m/stats"))["model_stats"][0];
  bench.report({.bench = "isolation",
                .what = "requests in a batch, on average",
                .got = double(all.requests) / stats.at("execution_count").get<double>(),
                .least = 2});
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
