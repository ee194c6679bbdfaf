// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/draw.h"

#include <algorithm>
#include <cmath>

#include "yoke/base/error.h"
#include "yoke/plan/chart.h"

namespace yoke::plan {
namespace {

struct Colour {
  Act act;
  const char *first, *later, *name;
};
constexpr Colour kColours[] = {{Act::F, "#7aa6e0", "#b9d0f0", "forward"},
                               {Act::B, "#e8a15c", "#f3cda6", "backward"},
                               {Act::I, "#e8a15c", "#f3cda6", "backward of the input"},
                               {Act::W, "#7fbf8a", "#b9dfc0", "backward of the weights"},
                               {Act::Recompute, "#c9b3e6", "#e0d4f2", "forward again"}};

// Whether it is one of its rank's stages after the first.
bool is_later(const Schedule& schedule, int stage) {
  const auto& ranks = schedule.rank_of;
  return std::find(ranks.begin(), ranks.begin() + stage, ranks[size_t(stage)]) !=
         ranks.begin() + stage;
}

std::string label(const Action& action, bool later) {
  std::string text = to_text({-1, action.act, -1});
  if (later) text[0] = char(std::tolower(text[0]));
  return cat(text, action.micro);
}

// Of what takes time.
Chart chart_of(const Schedule& schedule, const Simulation& simulation) {
  Chart chart{
      .title = cat(schedule.name, ": ", schedule.num_ranks(), " ranks, ", schedule.num_micro,
                   " micro-batches, ", simulation.makespan, " units of time, ",
                   std::lround(simulation.bubble * 1000) / 10.0, " % idle"),
      .length = simulation.makespan};
  for (const auto& colour : kColours) {
    const bool used = std::ranges::any_of(simulation.rows, [&](const auto& row) {
      return std::ranges::any_of(row, [&](const auto& t) { return t.action.act == colour.act; });
    });
    if (used) chart.legend.push_back({colour.first, colour.name});
  }
  for (size_t r = 0; r < simulation.rows.size(); ++r) {
    auto& row = chart.rows.emplace_back(cat("rank ", r));
    for (const auto& [action, begin, end] : simulation.rows[r]) {
      if (!action.takes_time()) continue;
      const auto* colour = std::ranges::find(kColours, action.act, &Colour::act);
      const bool later = is_later(schedule, action.stage);
      row.bars.push_back({.begin = begin,
                          .end = end,
                          .label = label(action, later),
                          .inside = cat(action.micro),
                          .tip = cat(to_text(action), ", ", begin, " to ", end),
                          .colour = later ? colour->later : colour->first});
    }
  }
  return chart;
}

}  // namespace

std::string draw_text(const Schedule& schedule, const Simulation& simulation, int columns) {
  return draw_text(chart_of(schedule, simulation), columns);
}

std::string draw_svg(const Schedule& schedule, const Simulation& simulation) {
  return draw_svg(chart_of(schedule, simulation));
}

void write_trace(const Simulation& simulation, std::ostream& out) {
  Chart chart;
  for (size_t r = 0; r < simulation.rows.size(); ++r) {
    auto& row = chart.rows.emplace_back(cat("rank ", r));
    for (const auto& [action, begin, end] : simulation.rows[r])
      row.bars.push_back({.begin = begin,
                          .end = end,
                          .name = to_text(action),
                          .category = action.computes() ? "compute" : "comm"});
  }
  write_trace(chart, 1000, out);
}

}  // namespace yoke::plan
