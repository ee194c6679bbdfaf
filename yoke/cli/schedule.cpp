// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/schedule.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/observe/json_lines.h"
#include "yoke/plan/check.h"
#include "yoke/plan/draw.h"
#include "yoke/plan/generate.h"
#include "yoke/plan/passes.h"

namespace yoke::cli {
namespace {

struct Options {
  std::string name, times = "1,1,1,0", stage_weights, rank_slowness, svg, trace;
  int ranks = 4, micro_batches = 8, chunks = 0;
  double memory = std::numeric_limits<double>::infinity(), kept = 1;
  bool check = false, json = false, text = false, csv = false;
};

std::vector<double> numbers(const std::string& option, const std::string& text) {
  std::vector<double> result;
  for (const auto& word : split(text, ',')) {
    char* end = nullptr;
    const double value = std::strtod(word.c_str(), &end);
    if (word.empty() || *end != '\0' || !(value >= 0) || value > 1e12)
      fail(Kind::Usage, option, " wants numbers of 0 or more with commas, got '", text, "'");
    result.push_back(value);
  }
  return result;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file) fail(Kind::Usage, "cannot read the schedule ", path);
  text << file.rdbuf();
  return text.str();
}

void write_file(const std::string& path, const std::function<void(std::ostream&)>& write) {
  std::ofstream file(path);
  if (file) write(file);
  if (!file.flush()) fail(Kind::Usage, "cannot write ", path);
}

plan::Schedule schedule_of(const Options& options, const plan::Limits& limits) {
  const bool is_file = options.name.find_first_of("/.") != std::string::npos;
  if (is_file) return plan::parse_csv(read_file(options.name));
  const bool choosable = options.name == "interleaved" || options.name == "looped-bfs";
  if (options.chunks != 0 && !choosable)
    fail(Kind::Usage, "--chunks is for interleaved and looped-bfs; ", options.name,
         " has its own number of stages on a rank");
  return plan::make_schedule(options.name, {.ranks = options.ranks,
                                            .micro_batches = options.micro_batches,
                                            .chunks = options.chunks == 0 ? 2 : options.chunks,
                                            .limits = limits});
}

int terminal_width() {
  winsize size{};
  return ::ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 160;
}

void schedule(const Options& options) {
  const auto times = numbers("--times", options.times);
  if (times.size() != 4)
    fail(Kind::Usage, "--times wants four numbers, F,I,W,COMM; got '", options.times, "'");
  plan::Limits limits{.memory = options.memory};
  plan::Costs& costs = limits.costs;
  costs.times = {times[0], times[1], times[2], times[3]};
  costs.kept_after_i = options.kept;
  if (!options.stage_weights.empty())
    costs.stage_weight = numbers("--stage-weights", options.stage_weights);
  if (!options.rank_slowness.empty())
    costs.rank_slowness = numbers("--rank-slowness", options.rank_slowness);
  const auto made = schedule_of(options, limits);
  const auto flaw = plan::find_flaw(made, limits);
  if (flaw && options.json)
    observe::JsonLines(std::cout).write(
        {{"name", made.name}, {"flaw", flaw->what}, {"deadlock_free", !flaw->deadlock}});
  if (flaw) fail(Kind::Usage, "the schedule is wrong\n", plan::picture_of(made, *flaw));
  const auto simulation = plan::simulate(made, costs);
  if (!options.svg.empty())
    write_file(options.svg, [&](std::ostream& out) { out << plan::draw_svg(made, *simulation); });
  if (!options.trace.empty())
    write_file(options.trace, [&](std::ostream& out) { plan::write_trace(*simulation, out); });
  if (options.json) {
    std::vector<observe::Json> rows;
    for (const auto& row : made.rows) {
      std::vector<std::string> texts;
      for (const auto& action : row) texts.push_back(plan::to_text(action));
      rows.emplace_back(texts);
    }
    observe::JsonLines(std::cout).write({{"name", made.name},
                                         {"ranks", made.num_ranks()},
                                         {"stages", made.num_stages()},
                                         {"micro_batches", made.num_micro},
                                         {"makespan", simulation->makespan},
                                         {"bubble", simulation->bubble},
                                         {"bubble_span", simulation->bubble_span},
                                         {"peak", simulation->peak},
                                         {"busy", simulation->busy},
                                         {"num_actions", made.num_actions()},
                                         {"actions", rows},
                                         {"deadlock_free", true}});
    return;
  }
  if (options.csv) {
    std::cout << plan::to_csv(made);
    return;
  }
  if (options.text || (options.svg.empty() && options.trace.empty() && !options.check))
    std::cout << plan::draw_text(made, *simulation, terminal_width());
  std::printf(
      "%s: %d ranks, %d stages, %d micro-batches: %.6g units of time, bubble %.1f %% "
      "(%.1f %% where steps may overlap), peak %.6g micro-batches on a rank\n",
      made.name.c_str(), made.num_ranks(), made.num_stages(), made.num_micro, simulation->makespan,
      100 * simulation->bubble, 100 * simulation->bubble_span, std::ranges::max(simulation->peak));
  if (options.check)
    std::printf(
        "checked: every stage on one rank; every micro-batch forward and backward once, in "
        "order; gradients reduced last; parameters there; no circle; memory; one order for each "
        "pair of ranks; "
        "no deadlock even if every message waits for its other end (%zu actions with "
        "messages)\n",
        plan::add_messages(made).num_actions());
}

}  // namespace

void add_schedule(CLI::App& app) {
  auto* verb = app.add_subcommand(
      "schedule", "Print, check, simulate and draw a pipeline schedule, without running it");
  auto options = std::make_shared<Options>();
  verb->add_option("NAME", options->name,
                   "One of " + join(plan::schedule_names(), ", ") + "; or a file that --csv made")
      ->required();
  verb->add_option("-p,--ranks", options->ranks, "Ranks, 1 to 64")->capture_default_str();
  verb->add_option("-m,--micro-batches", options->micro_batches, "Micro-batches of a step")
      ->capture_default_str();
  verb->add_option("--chunks", options->chunks,
                   "Stages of a rank, for interleaved and looped-bfs (2 unless set)");
  verb->add_option("--times", options->times,
                   "How long F, I and W of a rank's whole share of layers take, and a message")
      ->capture_default_str();
  verb->add_option("--stage-weights", options->stage_weights,
                   "How long each stage takes, relative to 1, with commas");
  verb->add_option("--rank-slowness", options->rank_slowness,
                   "How long each rank takes, relative to 1, with commas");
  verb->add_option("--memory", options->memory,
                   "Micro-batches that a rank may hold: zb-auto keeps to it, others are checked");
  verb->add_option("--kept", options->kept,
                   "The part of a micro-batch's memory that stays between its I and its W")
      ->capture_default_str();
  verb->add_flag("--check", options->check, "Tell what was checked");
  verb->add_flag("--text", options->text, "Draw it here (the default)");
  verb->add_flag("--csv", options->csv, "Print its actions, a line for each rank");
  verb->add_flag("--json", options->json, "Print one JSON object with all of it");
  verb->add_option("--svg", options->svg, "Draw it into this file")->type_name("FILE");
  verb->add_option("--trace", options->trace, "Write a timeline that ui.perfetto.dev opens")
      ->type_name("FILE");
  verb->callback([options] { schedule(*options); });
}

}  // namespace yoke::cli
