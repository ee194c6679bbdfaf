// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_serve.h"

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
  std::string peers, echo, device = "cpu";
  double seconds = 10;
  size_t echo_bytes = 0;
  int echo_threads = 1;
  bool json = false;
};

void run(const Options& options) {
  if (!options.echo.empty())
    return run_echo(options.echo, options.echo_bytes, options.echo_threads);
  BenchTable table{.seconds = options.seconds, .json = options.json};
  try {
    const auto host = read_visible_host(read_environment());
    table.device = topo::parse_devices(options.device, &host).at(0);
  } catch (const Error& error) {
    fail(Kind::Usage, "--device: ", error.what());
  }
  if (!options.peers.empty())
    table.peers = words("--peers", options.peers, {"litserve", "pytriton", "triton"});
  raise_file_limit();
  run_benches(table,
              {{"null", bench_null},
               {"resnet", bench_resnet},
               {"replicas", bench_replicas},
               {"fair", bench_fair},
               {"order", bench_order},
               {"isolation", bench_isolation},
               {"drain", bench_drain}},
              options.what);
}

}  // namespace

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
  auto* verb = app.add_subcommand("serve",
                                  "yoke serve under load, next to other servers; exits with 1 "
                                  "where an answer was wrong or missing or a target was "
                                  "missed");
  auto options = std::make_shared<Options>();
  verb->add_option("WHAT", options->what,
                   "null (a model that does nothing), resnet, replicas (how they add up), fair "
                   "(shares of tenants), order, isolation, drain; or all");
  verb->add_option("--peers", options->peers,
                   "With commas, of litserve, pytriton and triton: measured in the same run");
  verb->add_option("--seconds", options->seconds, "Of each measurement")->capture_default_str();
  verb->add_option("--device", options->device,
                   "Of resnet: cpu; or cuda:0, for two replicas that share it")
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->add_option("--port-file", options->echo)->group("");
  verb->add_option("--echo-bytes", options->echo_bytes)->group("");
  verb->add_option("--echo-threads", options->echo_threads)->group("");
  verb->callback([options] { run(*options); });
}

}  // namespace yoke::cli
