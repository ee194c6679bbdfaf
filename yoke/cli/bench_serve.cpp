// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_serve.h"

#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/environment.h"
#include "yoke/observe/json_lines.h"
#include "yoke/serve/grpc_load.h"

namespace yoke::cli {
namespace {

struct Options {
  std::vector<std::string> what = {};
  std::string peers, echo;
  double seconds = 10;
  size_t echo_bytes = 0;
  int echo_threads = 1;
  bool json = false;
};

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value >= 1000 ? "%.0f" : value >= 10 ? "%.1f" : "%.3g", value);
  return text;
}

std::string target_of(const Figure& figure) {
  if (figure.least && figure.most) return number(*figure.least) + " to " + number(*figure.most);
  if (figure.least) return ">= " + number(*figure.least);
  return figure.most ? "<= " + number(*figure.most) : "";
}

// Thousands of connections at once are more than the usual bound on files.
void raise_file_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

void run(const Options& options) {
  if (!options.echo.empty())
    return run_echo(options.echo, options.echo_bytes, options.echo_threads);
  const std::vector<std::pair<std::string, void (*)(BenchServe&)>> all{
      {"null", bench_null},   {"resnet", bench_resnet}, {"replicas", bench_replicas},
      {"fair", bench_fair},   {"order", bench_order},   {"isolation", bench_isolation},
      {"drain", bench_drain},
  };
  std::vector<std::string> known{"all"}, what = options.what;
  for (const auto& [name, function] : all) known.push_back(name);
  if (what.empty()) what = {"all"};
  for (const auto& word : what) words("WHAT", word, known);
  if (!(options.seconds >= 1 && options.seconds <= 600))
    fail(Kind::Usage, "--seconds wants 1 to 600, got ", options.seconds);
  BenchServe bench{.seconds = options.seconds, .json = options.json};
  if (!options.peers.empty())
    bench.peers = words("--peers", options.peers, {"litserve", "pytriton", "triton"});
  raise_file_limit();
  if (!options.json) {
    const auto host = read_visible_host(read_environment());
    std::printf("On %s, %d CPUs:\n\n", host.name.c_str(), host.num_usable_cpus);
    std::printf(
        "| %-9s | %-48s | %12s | %-12s | %-6s | %s |\n|%s|\n", "bench", "what", "got", "target",
        "passed", "more",
        "-----------|--------------------------------------------------|-------------:|--------"
        "------|--------|---");
  }
  for (const auto& [name, function] : all)
    if (std::ranges::count(what, name) > 0 || std::ranges::count(what, "all") > 0) {
      std::fprintf(stderr, "bench: %s\n", name.c_str());
      function(bench);
    }
  if (bench.wrong > 0) fail(Kind::Internal, bench.wrong, " answers were wrong; wanted none");
}

}  // namespace

void BenchServe::report(const Figure& figure) {
  const std::string target = target_of(figure);
  if (json) {
    observe::JsonObject line{
        {"bench", figure.bench}, {"what", figure.what}, {"got", figure.got}, {"unit", figure.unit}};
    if (figure.least) line.add("least", *figure.least);
    if (figure.most) line.add("most", *figure.most);
    if (!target.empty()) line.add("passed", figure.passed());
    for (const auto& [name, value] : figure.more) line.add(name, value);
    observe::JsonLines(std::cout).write(line);
    return;
  }
  std::vector<std::string> more;
  for (const auto& [name, value] : figure.more) more.push_back(name + " " + number(value));
  std::printf(
      "| %-9s | %-48s | %12s | %-12s | %-6s | %s |\n", figure.bench.c_str(), figure.what.c_str(),
      (number(figure.got) + (figure.unit.empty() ? "" : " " + figure.unit)).c_str(), target.c_str(),
      target.empty()    ? ""
      : figure.passed() ? "yes"
                        : "MISSED",
      join(more, ", ").c_str());
  std::fflush(stdout);
}

void BenchServe::skip(const std::string& name, const std::string& what,
                      const std::string& why) const {
  std::fprintf(stderr, "bench: %s: %s is left out: %s\n", name.c_str(), what.c_str(), why.c_str());
  if (json)
    observe::JsonLines(std::cout).write({{"bench", name}, {"what", what}, {"skipped", why}});
}

serve::LoadUser user_of(const Doubling& doubling) {
  struct State {
    serve::Question question = {};
    std::vector<float> values = {};
  };
  const auto fill = [doubling](serve::Question& question, uint64_t number) {
    const auto rows = int64_t(1 + number * 7919 % uint64_t(doubling.most_rows));
    serve::fill(question, doubling.seed << 40 | number, {rows, doubling.width});
  };
  serve::LoadUser user{.seed = doubling.seed + 1};
  user.make = [=, state = std::make_shared<State>()](uint64_t number, serve::LoadRequest& request) {
    auto& question = state->question;
    question.model = doubling.model;
    question.stream = doubling.stream;
    fill(question, number);
    if (doubling.grpc)
      request.rows = question.shape[0], request.body = serve::grpc_question(question);
    else
      serve::write_question(question, doubling.wire, request);
    if (!doubling.tenant.empty()) request.headers += "yoke-tenant: " + doubling.tenant + "\r\n";
    request.leave_after = doubling.leave_after;
  };
  user.check = [=, state = std::make_shared<State>()](uint64_t number,
                                                      const serve::LoadAnswer& answer) {
    if (answer.status != 200) return true;  // counted by its status
    fill(state->question, number);
    const auto& asked = state->question.values;
    auto& values = state->values;
    values.resize(asked.size());
    const bool whole = doubling.grpc ? serve::grpc_values(answer.body, values)
                                     : serve::read_values(answer.body, doubling.wire, values);
    return whole && std::ranges::equal(values, asked, {}, {}, [](float x) { return 2 * x; });
  };
  return user;
}

void add_bench_serve(CLI::App& app) {
  auto* verb = app.add_subcommand("serve", "yoke serve under load, next to other servers");
  auto options = std::make_shared<Options>();
  verb->add_option("WHAT", options->what,
                   "null (a model that does nothing), resnet, replicas (how they add up), fair "
                   "(shares of tenants), order, isolation, drain; or all");
  verb->add_option("--peers", options->peers,
                   "With commas, of litserve, pytriton and triton: measured in the same run");
  verb->add_option("--seconds", options->seconds, "Of each measurement")->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->add_option("--port-file", options->echo)->group("");
  verb->add_option("--echo-bytes", options->echo_bytes)->group("");
  verb->add_option("--echo-threads", options->echo_threads)->group("");
  verb->callback([options] { run(*options); });
}

}  // namespace yoke::cli
