// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/flow_bench.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/flow.h"
#include "yoke/flow/words.h"

namespace yoke::cli {
namespace {

constexpr int kWarmUp = 20;
constexpr int kLinks = 200;  // of a chain that does nothing

struct Options {
  std::vector<std::string> what = {}, inputs = {};
  std::string peers = "python", device = "cpu";
  double seconds = 7;
  bool json = false;
};

void add_word(flow::Graph& graph, const std::string& name, const std::string& text, int device) {
  const auto word = flow::find_word(text, graph.options().seed, name);
  YOKE_CHECK(word, text);
  graph.node(name, word->open,
             {.device = device, .inputs = word->inputs, .outputs = word->outputs});
}

flow::Tensors some_inputs(int64_t count, at::IntArrayRef shape) {
  flow::Tensors inputs;
  for (int64_t k = 0; k < count; ++k)
    inputs.push_back(at::arange(c10::multiply_integers(shape), at::kDouble)
                         .add_(k)
                         .sin_()
                         .to(at::kFloat)
                         .view(shape));
  return inputs;
}

// A source, then nodes that give what they get, on the ranks in turn.
std::unique_ptr<FlowRounds> do_nothing(const topo::Device& device, int ranks,
                                       const at::Tensor& value) {
  auto graph = flow_on(device, ranks);
  graph.node("source", flow::function([value](const flow::Tensors&) { return value; }),
             {.device = 0, .outputs = {"y"}});
  std::vector<std::string> names{"source"};
  for (int i = 1; i <= kLinks; ++i) {
    names.push_back(cat("n", i));
    add_word(graph, names.back(), "same", i % ranks);
  }
  graph.chain(names);
  graph.output("result", names.back());
  return std::make_unique<FlowRounds>(graph, FlowOptions{.wanted = {value}, .pin = true});
}

void bench_overhead(BenchTable& bench) {
  size_t operations = 0;
  const Turns turns(
      {"one rank"},
      [&](const std::string&) {
        auto flow = do_nothing(bench.device, 1, at::rand({8}));
        operations = flow->num_operations();
        return flow;
      },
      num_turns(bench), 0, "overhead");
  bench.report({.bench = "overhead",
                .what = "an operation that does nothing, 1 rank",
                .unit = "us",
                .got = turns.ms(0) * 1e3 / double(operations),
                .most = 10,
                .more = {{"operations", double(operations)}}});
}

void bench_handover(BenchTable& bench) {
  const Turns turns(
      {"two ranks"}, [&](const std::string&) { return do_nothing(bench.device, 2, at::rand({8})); },
      num_turns(bench), 0, "handover");
  bench.report({.bench = "handover",
                .what = "from rank to rank and an operation, 2 ranks",
                .unit = "us",
                .got = turns.ms(0) * 1e3 / kLinks,
                .most = 10,
                .more = {{"hand_overs", double(kLinks)}}});
}

// The same models on ranks of their own, or all on one.
std::unique_ptr<FlowRounds> ensemble_of(const topo::Device& device,
                                        const std::vector<std::string>& models, bool apart,
                                        const FlowOptions& options) {
  auto graph = flow_on(device, apart ? int(models.size()) : 1);
  graph.input("in", {}, 0);
  std::vector<std::string> names;
  for (size_t i = 0; i < models.size(); ++i) {
    names.push_back(cat("m", i));
    add_word(graph, names.back(), models[i], apart ? int(i) : 0);
  }
  graph.ensemble("all", "in", {.nodes = names, .merge = "stack", .device = 0});
  graph.output("out", "all");
  return std::make_unique<FlowRounds>(graph, options);
}

void report_ensemble(BenchTable& bench, const std::string& name, const std::string& what,
                     const std::vector<std::string>& models, const FlowOptions& options,
                     double least) {
  const Turns turns(
      {"on ranks of their own", "one after another"},
      [&](const std::string& how) {
        return ensemble_of(bench.device, models, how != "one after another", options);
      },
      num_turns(bench), 0, name);
  bench.report({.bench = name,
                .what = what,
                .unit = "x",
                .got = turns.ratio(0, 1),
                .least = least,
                .more = {{"ms", turns.ms(0)}, {"one_after_another_ms", turns.ms(1)}}});
}

void bench_ensemble(BenchTable& bench) {
  FlowOptions options{.inputs = some_inputs(4, {8, 16})};
  for (const auto& input : options.inputs)
    options.wanted.push_back(at::stack({input, input, input, input}));
  report_ensemble(bench, "ensemble", "4 that sleep 5 ms, 4 ranks, of in series",
                  std::vector<std::string>(4, "sleep:ms=5"), options, 3.8);
}

void bench_real(BenchTable& bench) {
  const std::vector<std::string> models(2, "mlp:256,256,256,256,256,256,256,256,256");
  const bool elsewhere = bench.device.kind != topo::DeviceKind::Cpu;  // where sums are rounded so
  FlowOptions options{
      .inputs = some_inputs(4, {512, 256}), .pin = true, .tolerance = elsewhere ? 1e-4 : 0};
  // What each gives when it is called without a flow.
  std::vector<flow::Body> bodies;
  for (size_t i = 0; i < models.size(); ++i)
    bodies.push_back(
        flow::find_word(models[i], flow::GraphOptions().seed, cat("m", i))->open(at::kCPU));
  for (const auto& input : options.inputs) {
    flow::Tensors outputs;
    for (const auto& body : bodies) outputs.push_back(body.run({input}, 0)[0].detach());
    options.wanted.push_back(at::stack(outputs));
  }
  report_ensemble(bench, "real", "2 MLPs, 2 ranks of 1 thread, of in series", models, options, 1.8);
}

std::unique_ptr<FlowRounds> sleepers(const topo::Device& device, const std::vector<int>& times_ms) {
  auto graph = flow_on(device, int(times_ms.size()));
  std::vector<std::string> names;
  for (size_t i = 0; i < times_ms.size(); ++i) {
    names.push_back(cat("s", i));
    add_word(graph, names.back(), cat("sleep:ms=", times_ms[i]), int(i));
  }
  graph.input("in", {names.front()}, 0);
  graph.chain(names);
  graph.output("out", names.back());
  const auto inputs = some_inputs(64, {8, 16});
  return std::make_unique<FlowRounds>(
      graph, FlowOptions{.inputs = inputs, .wanted = inputs, .under_way = 12});
}

void bench_chain(BenchTable& bench) {
  const Turns turns(
      {"chain", "slowest"},
      [&](const std::string& what) {
        return what == "chain" ? sleepers(bench.device, {3, 5, 4, 2}) : sleepers(bench.device, {5});
      },
      num_turns(bench), 0, "chain");
  bench.report(
      {.bench = "chain",
       .what = "stages of 3, 5, 4, 2 ms, of the slowest's rate",
       .unit = "x",
       .got = turns.ratio(0, 1),
       .least = 0.95,
       .more = {{"rounds_per_s", 1e3 / turns.ms(0)}, {"slowest_alone_per_s", 1e3 / turns.ms(1)}}});
}

void run(const Options& options) {
  BenchTable table{.seconds = options.seconds, .json = options.json};
  const Benches benches{{"overhead", bench_overhead}, {"handover", bench_handover},
                        {"ensemble", bench_ensemble}, {"real", bench_real},
                        {"chain", bench_chain},       {"peers", bench_flow_peers}};
  const std::string first = options.what.empty() ? "all" : options.what[0];
  const bool known = first == "all" || std::ranges::any_of(benches, [&](const auto& bench) {
                       return bench.first == first;
                     });
  if (!known && (first.ends_with(".toml") || std::filesystem::exists(first))) {
    const FlowFile file{.path = first,
                        .overrides = {options.what.begin() + 1, options.what.end()},
                        .inputs = options.inputs};
    (void)read_flow(file);  // what is wrong with it is told before the table begins
    return run_benches(table, {{first, [&](BenchTable& bench) { bench_flow_file(bench, file); }}},
                       {});
  }
  if (!options.inputs.empty())
    fail(Kind::Usage, "--input ", options.inputs[0], ": it is for a flow's file, got ", first);
  at::set_num_threads(1);  // here too, where what flows give is computed again
  try {
    const auto host = read_visible_host(read_environment());
    table.device = topo::parse_devices(options.device, &host).at(0);
  } catch (const Error& error) {
    fail(Kind::Usage, "--device: ", error.what());
  }
  if (!options.peers.empty()) table.peers = words("--peers", options.peers, {"python"});
  run_benches(table, benches, options.what);
}

}  // namespace

flow::Graph flow_on(const topo::Device& device, int ranks) {
  return flow::Graph({.devices = std::vector<topo::Device>(size_t(ranks), device)});
}

int num_turns(const BenchTable& bench) { return std::max(3, int(bench.seconds)); }

FlowRounds::FlowRounds(const flow::Graph& graph, FlowOptions options)
    : options_(std::move(options)),
      executor_(flow::compile(graph), {.threads_per_queue = 1, .pin = options_.pin}) {
  round(kWarmUp);
}

double FlowRounds::round(int steps) {
  const SteadyClock clock;
  const auto take_in_turn = [](const flow::Tensors& values, size_t i) -> const at::Tensor& {
    return values[i % values.size()];
  };
  flow::Tensors outputs;
  outputs.reserve(size_t(steps));
  const Time begin = clock.now();
  if (options_.inputs.empty()) executor_.run(steps);
  for (int i = 0, sent = 0; !options_.inputs.empty() && i < steps; ++i) {
    for (; sent < std::min(steps, i + options_.under_way); ++sent)
      executor_.submit({take_in_turn(options_.inputs, size_t(sent))});
    outputs.push_back(executor_.collect()[0]);
  }
  const Time end = clock.now();
  if (options_.inputs.empty()) outputs = executor_.last();
  for (auto& output : outputs) output = output.cpu();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& wanted = take_in_turn(options_.wanted, i);
    const bool right = options_.tolerance == 0
                           ? at::equal(outputs[i], wanted)
                           : at::allclose(outputs[i], wanted, 0, options_.tolerance);
    if (!right)
      fail(Kind::Internal, "the flow gave a wrong value in round ", i, " of ", steps,
           ": the largest difference is ", (outputs[i] - wanted).abs().max().item<double>());
  }
  return std::chrono::duration<double>(end - begin).count();
}

void add_flow_bench(CLI::App& flow) {
  auto* verb = flow.add_subcommand(
      "bench",
      "What running a flow costs, next to what is ideal and to the usual Python; how fast one of "
      "your own is");
  auto options = std::make_shared<Options>();
  verb->add_option(
      "WHAT", options->what,
      "overhead (of an operation), handover (between two ranks), ensemble (of models "
      "that sleep), real (of models that compute), chain (of models that sleep), peers "
      "(next to torch.distributed); or all. Or a FLOW of one's own, a TOML file or a folder with a "
      "flow.toml, and KEY=VALUE after it: on its devices, next to all of it on the first of them");
  verb->add_option("--input", options->inputs,
                   "Of a FLOW with inputs, as for yoke flow run: the same in every round")
      ->type_name("NAME=NUMBERS")
      ->allow_extra_args(false);
  verb->add_option("--peers", options->peers, "With commas, of python; '' for none")
      ->capture_default_str();
  verb->add_option("--seconds", options->seconds, "Of each measurement: turns of about a second")
      ->capture_default_str();
  verb->add_option("--device", options->device,
                   "That all ranks are on: cpu, or cuda:0 (the Python peer stays on the CPU); a "
                   "FLOW has its flow.devices")
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->footer(
      "A target that is missed makes it exit with 1. A FLOW that trains goes on training while it "
      "is timed, and keeps nothing; of one that does not, both placements must give the same.");
  verb->callback([options] { run(*options); });
}

}  // namespace yoke::cli
