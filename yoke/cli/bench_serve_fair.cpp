// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve fair`: shares of the devices' time. Eight replicas that sleep for 10 ms, three
// tenants, and the scenarios of fair_share_test.cpp with a real server.
#include <algorithm>
#include <cmath>
#include <exception>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_server.h"

namespace yoke::cli {
namespace {

using namespace std::chrono_literals;

constexpr int kDevices = 8, kBatchMs = 10;
constexpr double kCapacity = kDevices * 1000.0 / kBatchMs;  // requests a second
constexpr auto kWindow = 5s, kWarmUp = 2s;

std::string models() {
  return stand_in_model("m", cat("ms=", kBatchMs), kDevices) +
         stand_in_model("dear", cat("ms=", 4 * kBatchMs), kDevices);
}

std::string tenant(const std::string& name, double guaranteed, const std::string& keys = {}) {
  return cat("\n[[tenant]]\nname = \"", name, "\"\nguaranteed = ", guaranteed, "\nmax_queue = 64\n",
             keys);
}
std::string three_tenants() { return tenant("a", 0.5) + tenant("b", 0.3) + tenant("c", 0.2); }

// Everyone asks from 60 connections, which is always more than the devices take.
serve::LoadUser flood(const std::string& name, const std::string& model = "m") {
  auto user = user_of({.model = model, .seed = uint64_t(name[0]), .tenant = name});
  user.connections = 60;
  return user;
}

serve::LoadUser offer(const std::string& name, double part) {
  auto user = flood(name);
  user.rate = part * kCapacity;
  user.connections = 400;
  return user;
}

// A short form has less of both.
Duration at_most(BenchTable& bench, Duration length) { return std::min(bench.length(), length); }

void count_wrong(BenchTable& bench, const std::vector<serve::LoadReport>& reports) {
  for (const auto& report : reports) bench.wrong += report.wrong;
}

using Used = std::map<std::string, double>;
struct Sample {
  Time at = {};
  Used used = {};
};

// The load, and what each tenant has used by the ends of windows; the first is left out.
std::vector<Sample> run_sampled(BenchTable& bench, YokeServer& server,
                                const std::vector<serve::LoadUser>& users, Duration window,
                                int windows, std::vector<serve::LoadReport>* reports = nullptr) {
  const Duration warm_up = at_most(bench, kWarmUp);
  std::vector<Sample> samples;
  std::exception_ptr problem;
  std::vector<serve::LoadReport> found;
  {
    const Time begin = SteadyClock().now() + warm_up;
    const std::jthread looker([&] {
      try {
        for (int i = 0; i <= windows; ++i) {
          std::this_thread::sleep_until(begin + i * window);
          auto used = server.device_seconds();
          samples.push_back({SteadyClock().now(), std::move(used)});
        }
      } catch (...) {
        problem = std::current_exception();
      }
    });
    found = serve::run_load(
        {.to = server->http(), .warm_up = warm_up, .length = warm_up + windows * window + 200ms},
        users);
  }
  if (problem) std::rethrow_exception(problem);
  count_wrong(bench, found);
  if (reports) *reports = std::move(found);
  return samples;
}

double share(const Sample& from, const Sample& to, const std::string& name) {
  double sum = 0;
  for (const auto& [each, used] : to.used) sum += used - from.used.at(each);
  return sum > 0 ? (to.used.at(name) - from.used.at(name)) / sum : 0;
}
// Of all devices' time, used or not.
double part(const Sample& from, const Sample& to, const std::string& name) {
  const double time = std::chrono::duration<double>(to.at - from.at).count();
  return (to.used.at(name) - from.used.at(name)) / (time * kDevices);
}

// A guaranteed tenant beside a flood: nothing is lost, and it takes little longer than alone.
void bench_guarantee(BenchTable& bench) {
  YokeServer server(models() + three_tenants());
  const std::vector<std::string> guaranteed{"a", "b"};
  std::vector<double> solo;
  for (const auto& name : guaranteed) {
    const auto report =
        serve::run_load({.to = server->http(), .length = bench.length()}, {offer(name, 0.25)})[0];
    solo.push_back(report.percentile_ms(0.99));
    count_wrong(bench, {report});
  }
  std::vector<serve::LoadReport> reports;
  const auto samples =
      run_sampled(bench, server, {offer("a", 0.25), offer("b", 0.25), offer("c", 1)},
                  bench.length(), 1, &reports);
  for (size_t i = 0; i < guaranteed.size(); ++i) {
    bench.report({.bench = "fair",
                  .what = cat("(a) ", guaranteed[i], " beside a flood: lost requests"),
                  .got = double(reports[i].failed()),
                  .most = 0,
                  .more = {{"requests", double(reports[i].requests)}}});
    bench.report({.bench = "fair",
                  .what = cat("(a) ", guaranteed[i], " beside a flood: p99"),
                  .unit = "ms",
                  .got = reports[i].percentile_ms(0.99),
                  .most = 1.3 * solo[i] + kBatchMs,
                  .more = {{"solo_p99_ms", solo[i]}}});
  }
  const double rest = 1 - part(samples[0], samples[1], "a") - part(samples[0], samples[1], "b");
  bench.report({.bench = "fair",
                .what = "(a) the flood has of what is left",
                .got = part(samples[0], samples[1], "c") / rest,
                .least = 0.95,
                .more = {{"refused", double(reports[2].failed())}}});
}

void bench_floods(BenchTable& bench, const std::string& what, const std::string& model_of_c) {
  YokeServer server(models() + three_tenants());
  const int windows = std::max(2, int(bench.seconds / 5));
  std::vector<serve::LoadReport> reports;
  const auto samples = run_sampled(bench, server, {flood("a"), flood("b"), flood("c", model_of_c)},
                                   at_most(bench, kWindow), windows, &reports);
  // The same by the answers that clients got, as what each one takes is known.
  Used answered{{"a", double(reports[0].requests)},
                {"b", double(reports[1].requests)},
                {"c", double(reports[2].requests) * (model_of_c == "dear" ? 4 : 1)}};
  const double all = answered["a"] + answered["b"] + answered["c"];
  for (const auto& [name, wanted] : Used{{"a", 50}, {"b", 30}, {"c", 20}}) {
    double worst = wanted;
    for (size_t i = 1; i < samples.size(); ++i) {
      const double got = 100 * share(samples[i - 1], samples[i], name);
      if (std::abs(got - wanted) > std::abs(worst - wanted)) worst = got;
    }
    bench.report(
        {.bench = "fair",
         .what = cat(what, ": share of ", name, ", worst window"),
         .unit = "%",
         .got = worst,
         .least = wanted - 2,
         .most = wanted + 2,
         .more = {{"windows", double(windows)}, {"by_answers", 100 * answered[name] / all}}});
  }
}

// A tenant comes back to what others had borrowed, again and again; its guarantee is half of the
// devices. What is staged then is begun first, and two more at most.
void bench_return(BenchTable& bench) {
  constexpr int kTimes = 5;
  YokeServer server(models() + three_tenants());
  std::vector<serve::LoadUser> users{flood("b"), flood("c")};
  for (int i = 0; i < kTimes; ++i) {
    users.push_back(flood("a"));
    users.back().begin = 2s * (i + 1);
    users.back().end = users.back().begin + 1s;
  }
  std::vector<std::vector<Time>> begun(users.size());  // a batch takes as long as it sleeps
  std::vector<Time> back(users.size(), Time::max());
  for (size_t i = 0; i < users.size(); ++i)
    users[i].check = [&, i, check = users[i].check](uint64_t number,
                                                    const serve::LoadAnswer& answer) {
      begun[i].push_back(answer.done - std::chrono::milliseconds(kBatchMs));
      back[i] = std::min(back[i], answer.due);
      return check(number, answer);
    };
  count_wrong(bench, serve::run_load({.to = server->http(), .length = 2s * (kTimes + 1)}, users));
  std::vector<int> others;
  for (size_t i = 2; i < users.size(); ++i) {
    std::ranges::sort(begun[i]);
    if (begun[i].size() < kDevices / 2) fail(Kind::Internal, "a tenant that came back got nothing");
    const Time own = begun[i][kDevices / 2 - 1];
    const auto between = [&](Time time) { return time >= back[i] && time < own; };
    others.push_back(
        int(std::ranges::count_if(begun[0], between) + std::ranges::count_if(begun[1], between)));
  }
  std::ranges::sort(others);
  bench.report({.bench = "fair",
                .what = "(d) others' batches until a lender is back",
                .got = double(others.back()),
                .most = kDevices + 2,
                .more = {{"median", double(others[kTimes / 2])}, {"times", kTimes}}});
}

void bench_limits(BenchTable& bench) {
  const auto measure = [&](const std::string& tenants, const std::string& who) {
    YokeServer server(models() + tenants);
    const auto samples =
        run_sampled(bench, server, {flood(who)}, std::max<Duration>(bench.length() / 2, 1s), 1);
    return 100 * part(samples[0], samples[1], who);
  };
  bench.report({.bench = "fair",
                .what = "(e) alone under a ceiling of 25 %",
                .unit = "%",
                .got = measure(tenant("a", 0.5) + tenant("b", 0.1, "ceiling = 0.25\n"), "b"),
                .least = 24,
                .most = 26});
  bench.report({.bench = "fair",
                .what = "(e) alone beside 25 % that are not lent",
                .unit = "%",
                .got = measure(tenant("a", 0.5, "lendable = 0.5\n") + tenant("c", 0.2), "c"),
                .least = 74,
                .most = 76});
}

// What others do fails at least one of (a) and (b), else those would show nothing.
void bench_control(BenchTable& bench, const std::string& policy) {
  YokeServer server(models() + three_tenants(), cat("policy = \"", policy, "\"\n"));
  std::vector<serve::LoadReport> beside;
  run_sampled(bench, server, {offer("a", 0.25), offer("b", 0.25), offer("c", 1)},
              at_most(bench, kWindow), 1, &beside);
  const auto samples =
      run_sampled(bench, server, {flood("a"), flood("b"), flood("c")}, at_most(bench, kWindow), 1);
  const double lost = double(beside[0].failed() + beside[1].failed());
  const double share_of_a = 100 * share(samples[0], samples[1], "a");
  bench.report({.bench = "fair",
                .what = cat("control ", policy, ": fails of (a) and (b)"),
                .got = double(lost > 0) + double(std::abs(share_of_a - 50) > 2),
                .least = 1,
                .more = {{"lost", lost},
                         {"p99_of_a_ms", beside[0].percentile_ms(0.99)},
                         {"share_of_a", share_of_a}}});
}

}  // namespace

void bench_fair(BenchTable& bench) {
  bench_guarantee(bench);
  bench_floods(bench, "(b) all flood", "m");
  bench_floods(bench, "(c) c's rows cost 4x", "dear");
  bench_return(bench);
  bench_limits(bench);
  for (const char* policy : {"fifo", "priority", "round_robin"}) bench_control(bench, policy);
}

}  // namespace yoke::cli
