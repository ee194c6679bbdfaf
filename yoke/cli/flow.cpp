// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/flow.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/flight_watch.h"
#include "yoke/cli/flow_file.h"
#include "yoke/comm/stop_signal.h"
#include "yoke/flow/config.h"
#include "yoke/flow/executor.h"
#include "yoke/flow/place.h"
#include "yoke/flow/words.h"
#include "yoke/models/port.h"
#include "yoke/observe/json_lines.h"
#include "yoke/observe/progress.h"
#include "yoke/observe/trace.h"
#include "yoke/plan/replay.h"

namespace yoke::cli {
namespace {

struct Options : FlowFile {
  std::string trace = {}, svg = {}, save = {};
  bool json = false, text = false;
};

void write_file(const std::string& path, const std::function<void(std::ostream&)>& write) {
  std::ofstream file(path);
  if (file) write(file);
  if (!file.flush()) fail(Kind::Io, "cannot write ", path);
}

std::string short_text(const at::Tensor& value) {
  const auto flat = value.reshape({-1}).to(at::kCPU, at::kDouble);
  std::vector<std::string> numbers;
  for (int64_t i = 0; i < std::min<int64_t>(flat.numel(), 8); ++i)
    numbers.push_back(cat(flat[i].item<double>()));
  if (flat.numel() > 8) numbers.push_back("…");
  return cat(plan::to_text(models::type_of(value.scalar_type()), value.sizes()), " ",
             join(numbers, " "));
}

void print_result(const Options& options, const std::vector<std::string>& names,
                  const flow::Tensors& values) {
  if (options.json && !values.empty()) {
    nlohmann::ordered_json json;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto flat = values[i].reshape({-1}).to(at::kCPU, at::kDouble).contiguous();
      json[names[i]] = {
          {"shape", std::vector<int64_t>(values[i].sizes().begin(), values[i].sizes().end())},
          {"data", std::vector<double>(flat.const_data_ptr<double>(),
                                       flat.const_data_ptr<double>() + flat.numel())}};
    }
    std::cout << json.dump() << "\n";
    return;
  }
  for (size_t i = 0; i < values.size(); ++i)
    std::cout << names[i] << " = " << short_text(values[i]) << "\n";
}

// The weights of what was trained, a file for each node.
void save(const Options& options, const flow::Executor& executor) {
  const std::filesystem::path folder = options.save;
  for (const auto& node : executor.compiled().graph.nodes()) {
    if (node.options.role != flow::Role::Train || !node.options.weights_of.empty() ||
        node.copy_of >= 0)
      continue;
    std::string name = node.name;
    std::ranges::replace(name, '/', '-');
    flow::save_weights(executor.body(node.name), folder / (name + ".safetensors"));
    std::cerr << "saved " << (folder / (name + ".safetensors")).string() << "\n";
  }
}

// Before anything is computed that would be lost.
void make_folder(const char* option, const std::string& path) {
  std::error_code failure;
  if (!path.empty()) std::filesystem::create_directories(path, failure);
  if (failure || (!path.empty() && ::access(path.c_str(), W_OK) != 0))
    fail(Kind::Io, option, " ", path, ": no folder to write into",
         failure ? cat(" (", failure.message(), ")") : "");
}

std::string summary(const flow::Report& report) {
  return cat(report.rounds, report.rounds == 1 ? " round in " : " rounds in ",
             duration_text(std::chrono::duration_cast<Duration>(
                 std::chrono::duration<double>(report.seconds))),
             "; bottleneck: ", report.bottleneck(), "\n");
}

void run(const Options& options) {
  const auto config = read_flow(options);
  const SteadyClock clock;
  observe::Tracer tracer(clock, 1 << 16);
  const bool traced = !options.trace.empty();
  make_folder("--trace", options.trace);
  make_folder("--save", options.save);
  at::manual_seed(uint64_t(config.flow.seed));  // of models that draw themselves
  FlightWatch watch;
  const comm::StopSignal signals;
  flow::Executor executor(compile_flow(options, config.graph),
                          {.timeout = std::chrono::duration_cast<Duration>(
                               std::chrono::duration<double>(config.flow.timeout_s)),
                           .threads_per_queue = int(config.flow.threads),
                           .tracer = traced ? &tracer : nullptr,
                           .on_world = watch.on_world()});
  for (const auto& text : executor.compiled().warnings()) std::cerr << "yoke: " << text << "\n";
  const bool trains = std::ranges::any_of(executor.compiled().graph.nodes(), [](const auto& node) {
    return node.options.role == flow::Role::Train;
  });
  if (!options.save.empty() && !trains)
    fail(Kind::Usage, "--save ", options.save,
         ": no node of the flow is trained (role = \"train\")");
  observe::Progress progress(std::cerr, clock,
                             {.label = config.flow.name,
                              .total = uint64_t(config.flow.rounds),
                              .unit = "rounds",
                              .is_terminal = ::isatty(2) != 0,
                              .patience = std::chrono::seconds(2)});
  // A signal ends it after the round that is under way, so that what was learnt can be kept. With
  // inputs there is that one alone.
  const std::jthread listener([&](const std::stop_token& ends) {
    for (; !ends.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
      if (!executor.inputs().empty()) continue;
      progress.update(uint64_t(executor.rounds()));
      if (signals.pending() != 0) executor.halt();
    }
  });
  std::vector<std::string> losses;
  for (const auto& node : executor.compiled().graph.nodes())
    if (!node.options.loss.empty()) losses.push_back(node.name);
  if (executor.inputs().empty() && !options.inputs.empty())
    fail(Kind::Usage, "the flow takes no inputs, got --input ", options.inputs[0]);
  if (!executor.inputs().empty()) {
    if (options.rounds.value_or(1) != 1)
      fail(Kind::Usage, "a flow with inputs makes one round of them, got --rounds ",
           *options.rounds);
    print_result(options, executor.outputs(),
                 executor.step(parse_inputs(options.inputs, executor)));
  } else {
    const int64_t rounds = config.flow.rounds;
    const int64_t every =
        config.flow.log_every > 0 ? config.flow.log_every : std::max<int64_t>(1, rounds / 10);
    for (int64_t done = 0; done < rounds && signals.pending() == 0;) {
      const int64_t made = executor.run(std::min(every, rounds - done));
      if (made == 0) break;  // a signal came first
      done += made;
      std::string line = cat("round ", done);
      nlohmann::ordered_json json{{"round", done}};
      for (const auto& node : losses) {
        const auto history = executor.losses(node);
        if (history.empty()) continue;  // an arm of a branch that has not run
        line += cat("  ", node, " ", history.back());
        json["losses"][node] = history.back();
      }
      if (!losses.empty()) std::cout << (options.json ? json.dump() : line) << "\n" << std::flush;
    }
    if (executor.rounds() > 0) print_result(options, executor.outputs(), executor.last());
  }
  if (!options.save.empty()) save(options, executor);
  const auto report = executor.report();
  if (traced) {
    const auto folder = std::filesystem::path(options.trace);
    write_file(folder / "trace.json", [&](std::ostream& out) { tracer.write_chrome_trace(out); });
    write_file(folder / "flow.json", [&](std::ostream& out) { out << report.json() << "\n"; });
  }
  if (options.json)
    std::cout << report.json() << "\n";
  else
    std::cerr << (options.text ? report.table() : summary(report));
  if (traced) std::cerr << "traced: see yoke trace " << options.trace << "\n";
  if (const int signal = signals.pending()) {
    std::cerr << "yoke: ended by signal " << signal
              << (report.rounds == 0 ? " before the first round"
                                     : cat(" after round ", report.rounds))
              << (options.save.empty() ? "\n" : "; the weights are saved\n");
    throw CLI::RuntimeError(signal == SIGUSR1 ? 85 : 128 + signal);
  }
}

void check(const Options& options) {
  const auto compiled = compile_flow(options, read_flow(options).graph);
  if (const auto knot = compiled.knot()) {
    if (options.json) {
      const auto& part = *plan::with_parts(compiled.program)[size_t(knot->part + 1)];
      auto circle = nlohmann::ordered_json::array();  // each waits for the next
      for (const auto& step : knot->circle)
        circle.push_back({{"queue", part.queues[size_t(step.queue)]},
                          {"operation", part.rows[size_t(step.queue)][step.index].name},
                          {"why", step.why}});
      std::cout << nlohmann::ordered_json{{"deadlock_free", false},
                                          {"rule", plan::rule_name(knot->rule)},
                                          {"what", knot->what},
                                          {"circle", circle},
                                          {"suggestion", knot->suggestion.text}}
                       .dump()
                << "\n";
    }
    flow::check(compiled);
  }
  const auto operations = compiled.program.num_operations();
  if (options.json)
    std::cout << nlohmann::ordered_json{{"deadlock_free", true},
                                        {"deterministic", !plan::hangs_on_timing(compiled.program)},
                                        {"nodes", compiled.graph.nodes().size()},
                                        {"operations", operations}}
                     .dump()
              << "\n";
  else
    std::cout << options.path << ": " << compiled.verdict() << "; " << compiled.graph.nodes().size()
              << " nodes, " << operations << " operations on " << compiled.program.queues.size()
              << " devices: rates balance, no circle waits for itself, messages and meetings "
                 "agree, no node writes (in_place) what another reads at the time, declared shapes "
                 "agree\n";
}

void show(const Options& options) {
  const auto config = read_flow(options);
  const auto compiled = compile_flow(options, config.graph);
  flow::check(compiled);
  const int64_t rounds = options.rounds.value_or(4);
  std::string stuck;
  const auto replayed = plan::replay(compiled.program, rounds, {}, &stuck);
  if (!replayed) fail(Kind::Internal, stuck);
  if (!options.svg.empty())
    write_file(options.svg,
               [&](std::ostream& out) { out << plan::draw_svg(compiled.program, *replayed); });
  if (!options.trace.empty())
    write_file(options.trace,
               [&](std::ostream& out) { plan::write_trace(compiled.program, *replayed, out); });
  const std::string costliest = replayed->costliest_channel < 0
                                    ? ""
                                    : plan::part_of(compiled.program, replayed->costliest_parts)
                                          .channels[size_t(replayed->costliest_channel)]
                                          .name;
  const auto weights = flow::memory_of(compiled.graph, compiled.queue_of, compiled.bodies);
  std::vector<uint64_t> peaks;
  for (size_t i = 0; i < weights.size(); ++i)
    peaks.push_back(weights[i] + uint64_t(replayed->peak_bytes[i]));
  if (options.json) {
    std::vector<std::string> path;
    for (const auto& link : replayed->critical)
      path.push_back(plan::name_of(compiled.program, link.queue, link.timed));
    std::cout << nlohmann::ordered_json{{"makespan_s", replayed->makespan},
                                        {"period_s", replayed->period},
                                        {"busy", replayed->busy},
                                        {"peak_bytes", peaks},
                                        {"weights_bytes", weights},
                                        {"critical_path", path},
                                        {"costliest_edge", costliest},
                                        {"text", plan::to_text(compiled.program)}}
                     .dump()
              << "\n";
    return;
  }
  std::cout << compiled.placement() << "\n"
            << plan::to_text(compiled.program) << "\n"
            << plan::draw_text(compiled.program, *replayed, 120) << "\n"
            << compiled.verdict() << "; simulated, " << rounds
            << " rounds: " << replayed->makespan * 1e3 << " ms, then " << replayed->period * 1e3
            << " ms a round\n";
  for (size_t i = 0; i < compiled.program.queues.size(); ++i)
    std::printf("%s busy %.0f %%, holds at most %s, %s of it weights, gradients and optimizers\n",
                compiled.program.queues[i].c_str(), 100 * replayed->busy[i],
                bytes_text(peaks[i]).c_str(), bytes_text(weights[i]).c_str());
  std::vector<std::string> path;
  size_t entered = 0;  // a loop: what it does is told once for all its turns
  for (const auto& link : replayed->critical) {
    const auto name = plan::name_of(compiled.program, link.queue, link.timed);
    const bool inside = !link.timed.parts.empty();
    if (path.empty() ||
        (inside ? std::find(path.begin() + ptrdiff_t(entered), path.end(), name) == path.end()
                : path.back() != name))
      path.push_back(name);
    if (!inside) entered = path.size();
  }
  if (path.size() > 12) path.erase(path.begin(), path.end() - 12);
  std::cout << std::flush;
  std::printf("critical path, its end: %s\n", join(path, " > ").c_str());
  if (!costliest.empty())
    std::printf("the edge that is waited for longest: '%s', %.3f ms in all\n", costliest.c_str(),
                replayed->costliest_wait * 1e3);
}

CLI::App* verb(CLI::App& flow, const char* name, const char* about,
               const std::shared_ptr<Options>& options, void (*act)(const Options&)) {
  auto* verb = flow.add_subcommand(name, about);
  verb->add_option("FLOW", options->path, "A flow's TOML file, or a folder with a flow.toml")
      ->required();
  verb->add_option("OVERRIDE", options->overrides,
                   "Keys of [flow] as KEY=VALUE: flow.devices=cpu:4");
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->callback([options, act] { act(*options); });
  return verb;
}

}  // namespace

void add_flow(CLI::App& app) {
  auto* flow = app.add_subcommand(
      "flow", "Several models that work together, proved free of deadlock first");
  flow->require_subcommand(1);
  auto ran = std::make_shared<Options>(), checked = std::make_shared<Options>(),
       shown = std::make_shared<Options>();
  auto* run_verb = verb(*flow, "run", "Run it, and tell where the time went", ran, run);
  run_verb->add_option("--rounds", ran->rounds, "Instead of flow.rounds");
  run_verb
      ->add_option("--save", ran->save,
                   "Write the weights of every trained node into this folder, for node.weights")
      ->type_name("FOLDER");
  run_verb->add_flag("--figures", ran->text, "Tell where the time went, by node and edge");
  run_verb
      ->add_option("--input", ran->inputs,
                   "A value for an input: 'x=1,2;3,4', rows with semicolons; once for each input")
      ->type_name("NAME=NUMBERS")
      ->allow_extra_args(false);
  run_verb
      ->add_option("--trace", ran->trace,
                   "Write a timeline and the figures of every node and edge into this folder, for "
                   "yoke trace")
      ->type_name("FOLDER");
  verb(*flow, "check",
       "Prove that it cannot get stuck, or print the circle and what to do about it", checked,
       check);
  auto* show_verb =
      verb(*flow, "show", "Devices, operations, simulated time; without running it", shown, show);
  show_verb->add_option("--rounds", shown->rounds, "To simulate (4 unless set)");
  show_verb->add_option("--svg", shown->svg, "Draw it into this file")->type_name("FILE");
  show_verb->add_option("--trace", shown->trace, "Write a timeline that ui.perfetto.dev opens")
      ->type_name("FILE");
  flow->add_subcommand("words", "The nodes that need no file")->callback([] {
    std::cout << flow::describe_words();
  });
  flow->add_subcommand("keys", "Every key of a flow's TOML file")->callback([] {
    std::cout << flow::describe_keys();
  });
  add_flow_bench(*flow);
}

}  // namespace yoke::cli
