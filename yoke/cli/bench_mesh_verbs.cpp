// SPDX-License-Identifier: Apache-2.0
// The command lines of `yoke bench pipeline` and `yoke bench tensor`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_mesh.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/observe/json_lines.h"
#include "yoke/plan/draw.h"
#include "yoke/plan/generate.h"
#include "yoke/plan/passes.h"

namespace yoke::cli {
namespace {

struct PipelineOptions {
  std::string schedules = "1f1b,zb-h1,zbv", peers;
  int ranks = 2, micro_batches = 8, rounds = 7, steps = 0;
  double stand_in_ms = 0;
  bool json = false, timelines = false;
};

// The fewest from `wanted` on that the schedule's rule allows.
int allowed_micro(const std::string& name, int ranks, int wanted) {
  for (int micro = name == "layer" ? 1 : wanted;; ++micro) try {
      plan::make_schedule(name, {.ranks = ranks, .micro_batches = micro});
      return micro;
    } catch (const Error&) {
      if (micro > wanted + 4 * ranks) throw;
    }
}

// How near the executor comes to the simulator where computing takes exactly as long as it is told,
// and what an action costs where it takes no time at all.
void bench_stand_ins(const PipelineOptions& options, const std::vector<std::string>& names) {
  if (!options.json)
    std::printf("| %-11s | %5s | %5s | %12s | %11s | %10s |\n|%s|\n", "schedule", "ranks", "micro",
                "simulated ms", "measured ms", "difference",
                "-------------|------:|------:|-------------:|------------:|-----------:");
  const double ms = options.stand_in_ms;
  for (const auto& name : names) {
    const int micro = allowed_micro(name, options.ranks, options.micro_batches);
    const StandIn stand_in{
        .schedule = plan::make_schedule(name, {.ranks = options.ranks, .micro_batches = micro}),
        .times = {ms, ms, ms, 0}};
    const double predicted = plan::simulate(stand_in.schedule, {.times = stand_in.times})->makespan;
    const double measured = run_stand_in(stand_in, 3);
    if (options.json)
      observe::JsonLines(std::cout).write({{"schedule", name},
                                           {"ranks", options.ranks},
                                           {"micro_batches", micro},
                                           {"simulated_ms", predicted},
                                           {"measured_ms", measured}});
    else
      std::printf("| %-11s | %5d | %5d | %12.2f | %11.2f | %8.2f %% |\n", name.c_str(),
                  options.ranks, micro, predicted, measured, 100 * (measured / predicted - 1));
    std::fflush(stdout);
  }
  constexpr int kMany = 256;
  const StandIn idle{.schedule =
                         plan::make_schedule("zb-h1", {.ranks = 1, .micro_batches = kMany})};
  const double us = run_stand_in({idle.schedule, {0, 0, 0, 0}}, 5) * 1e3 / (3 * kMany);
  if (options.json)
    observe::JsonLines(std::cout).write({{"overhead_us_per_action", us}});
  else
    std::printf("An action costs %.1f us besides its work (zb-h1, 1 rank, %d micro-batches).\n", us,
                kMany);
}

// As the simulator sees it with the mean times that were measured, and as it was.
void show_timelines(const PipelineTrainer& trainer) {
  const auto& measured = trainer.measured();
  const auto costs = costs_of(trainer.schedule(), measured);
  const auto predicted = plan::simulate(plan::add_messages(trainer.schedule()), costs);
  std::printf("%s, simulated with the mean times of its actions: %.2f ms\n%s",
              trainer.schedule().name.c_str(), predicted->makespan,
              plan::draw_text(trainer.schedule(), *predicted).c_str());
  std::printf("measured: %.2f ms, %+.1f %%\n%s\n", measured.makespan,
              100 * (measured.makespan / predicted->makespan - 1),
              plan::draw_text(trainer.schedule(), measured).c_str());
}

// Rows of ours, with how many times as fast they are as each peer.
void show(const std::vector<std::string>& names, size_t num_ours, const Turns& turns, bool json) {
  if (!json)
    std::printf("| %-18s | %10s | %s |\n|%s|\n", "what", "ms a step", "times as fast, by peer",
                "--------------------|-----------:|---");
  for (size_t i = 0; i < names.size(); ++i) {
    std::vector<std::string> against;
    for (size_t other = num_ours; i < num_ours && other < names.size(); ++other) {
      char text[64];
      std::snprintf(text, sizeof text, "%s %.2f", names[other].c_str(), turns.ratio(i, other));
      against.emplace_back(text);
    }
    if (json)
      observe::JsonLines(std::cout).write(
          {{"what", names[i]}, {"ms_per_step", turns.ms(i)}, {"against", join(against, ", ")}});
    else
      std::printf("| %-18s | %10.2f | %s |\n", names[i].c_str(), turns.ms(i),
                  join(against, ", ").c_str());
  }
  std::fflush(stdout);
}

void check_numbers(int ranks, int micro_batches, int rounds, int steps) {
  if (ranks < 1 || ranks > 64 || micro_batches < 1 || rounds < 1 || steps < 0)
    fail(Kind::Usage,
         "--ranks wants 1 to 64, --micro-batches and --rounds 1 or more, --steps 0 or more; got ",
         ranks, ", ", micro_batches, ", ", rounds, " and ", steps);
}

void bench_pipeline(const PipelineOptions& options) {
  check_numbers(options.ranks, options.micro_batches, options.rounds, options.steps);
  auto names = options.schedules == "all"
                   ? plan::schedule_names()
                   : words("--schedules", options.schedules, plan::schedule_names());
  if (options.stand_in_ms > 0) return bench_stand_ins(options, names);
  const size_t num_ours = names.size();
  if (!options.peers.empty())
    for (const auto& peer :
         words("--peers", options.peers, {"1f1b", "gpipe", "interleaved", "zbv"}))
      names.push_back("torch-" + peer);
  const Turns turns(
      names,
      [&](const std::string& name) -> std::unique_ptr<Trainer> {
        if (name.starts_with("torch-"))
          return make_peer("pipeline.py",
                           {"--schedule", name.substr(6), "--ranks", cat(options.ranks),
                            "--micro-batches", cat(options.micro_batches), "--threads", "1"});
        return make_pipeline_trainer(
            {.schedule = name, .ranks = options.ranks, .micro_batches = options.micro_batches});
      },
      options.rounds, options.steps, "pipeline");
  show(names, num_ours, turns, options.json);
  for (size_t i = 0; i < num_ours && options.timelines; ++i)
    show_timelines(dynamic_cast<PipelineTrainer&>(turns.trainer(i)));
}

struct TensorOptions {
  std::string peers;
  int ranks = 2, rounds = 7, steps = 0;
  bool json = false;
};

void bench_tensor(const TensorOptions& options) {
  check_numbers(options.ranks, 1, options.rounds, options.steps);
  std::vector<std::string> names{"one rank", "tensor", "sequence"};
  const size_t num_ours = names.size();
  if (!options.peers.empty())
    for (const auto& peer :
         words("--peers", options.peers, {"dtensor", "dtensor-compile", "dtensor-sequence"}))
      names.push_back(peer);
  const Turns turns(
      names,
      [&](const std::string& name) -> std::unique_ptr<Trainer> {
        if (name.starts_with("dtensor"))
          return make_peer("tensor.py",
                           {"--ranks", cat(options.ranks), "--threads", "1", "--compile",
                            name == "dtensor-compile" ? "yes" : "no", "--sequence-parallel",
                            name == "dtensor-sequence" ? "yes" : "no"});
        return make_tensor_trainer(name == "one rank" ? 1 : options.ranks, name == "sequence");
      },
      options.rounds, options.steps, "tensor");
  show(names, num_ours, turns, options.json);
}

}  // namespace

void add_bench_mesh(CLI::App& bench) {
  auto* pipeline = bench.add_subcommand(
      "pipeline", "Training steps of a pipeline, and how near it comes to its simulation");
  auto chosen = std::make_shared<PipelineOptions>();
  pipeline
      ->add_option("--schedules", chosen->schedules,
                   "With commas, of " + join(plan::schedule_names(), ", ") + "; or all")
      ->capture_default_str();
  pipeline->add_option("--ranks", chosen->ranks, "Ranks, each a thread with one core")
      ->capture_default_str();
  pipeline->add_option("--micro-batches", chosen->micro_batches, "In a step, of 256 tokens each")
      ->capture_default_str();
  pipeline
      ->add_option("--stand-in", chosen->stand_in_ms,
                   "Layers that sleep so many ms for each of F, I and W, in place of a GPT: "
                   "next to the simulator")
      ->type_name("MS");
  pipeline->add_option(
      "--peers", chosen->peers,
      "With commas, of 1f1b, gpipe, interleaved, zbv: torch.distributed.pipelining "
      "over gloo");
  pipeline->add_flag("--timelines", chosen->timelines,
                     "Draws the last step of each, next to its simulation");
  auto* tensor = bench.add_subcommand("tensor", "Training steps of layers cut over ranks");
  auto of_tensor = std::make_shared<TensorOptions>();
  tensor->add_option("--ranks", of_tensor->ranks, "Ranks, each a thread with one core")
      ->capture_default_str();
  tensor->add_option(
      "--peers", of_tensor->peers,
      "With commas, of dtensor, dtensor-compile, dtensor-sequence: PyTorch's DTensor "
      "over gloo");
  auto common = [](CLI::App* verb, auto& options) {
    verb->add_option("--rounds", options->rounds, "How often all of them take turns")
        ->capture_default_str();
    verb->add_option("--steps", options->steps, "Steps of a round; 0: about a second")
        ->capture_default_str();
    verb->add_flag("--json", options->json, "One JSON object per line");
  };
  common(pipeline, chosen);
  common(tensor, of_tensor);
  pipeline->callback([chosen] { bench_pipeline(*chosen); });
  tensor->callback([of_tensor] { bench_tensor(*of_tensor); });
}

}  // namespace yoke::cli
