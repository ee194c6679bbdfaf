// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <set>
#include <tuple>

#include "yoke/base/error.h"
#include "yoke/plan/chart.h"
#include "yoke/plan/replay.h"

namespace yoke::plan {
namespace {

struct Look {
  const char *even, *odd, *name;  // colours of rounds
};
// By Operation::Kind.
constexpr std::array<Look, 7> kLooks{{{"#7aa6e0", "#b9d0f0", "compute"},
                                      {"#d9c25b", "#ece0a8", "copy"},
                                      {"#e8a15c", "#f3cda6", "send"},
                                      {"#e8a15c", "#f3cda6", "receive"},
                                      {"#7fbf8a", "#b9dfc0", "collective"},
                                      {"#c9b3e6", "#e0d4f2", "loop"},
                                      {"#9fd3d6", "#cfe9ea", "branch"}}};
constexpr const char* kCritical = "#c0202a";

std::string ms(double seconds) { return cat(seconds * 1e3, " ms"); }

Chart chart_of(const Program& program, const Replayed& replayed) {
  const auto key = [](int queue, const Replayed::Timed& timed) {
    return std::tuple(queue, timed.parts, timed.index, timed.round, timed.turn, timed.begin);
  };
  std::set<decltype(key(0, {}))> critical;
  for (const auto& [queue, timed, channel] : replayed.critical) critical.insert(key(queue, timed));
  Chart chart{
      .title = cat(program.name, program.name.empty() ? "" : ": ", program.queues.size(),
                   " queues, ", ms(replayed.makespan), ", a round each ", ms(replayed.period)),
      .length = replayed.makespan,
      .clips = true};
  std::array<bool, kLooks.size()> used{};
  for (size_t q = 0; q < replayed.rows.size(); ++q) {
    auto& row = chart.rows.emplace_back(program.queues[q]);
    for (const auto& timed : replayed.rows[q]) {
      const auto& operation = part_of(program, timed.parts).rows[q][timed.index];
      const auto name = name_of(program, int(q), timed);
      const auto& look = kLooks[size_t(operation.kind)];
      const bool is_critical = critical.contains(key(int(q), timed));
      used[size_t(operation.kind)] = true;
      row.bars.push_back({.begin = timed.begin,
                          .end = timed.end,
                          .name = name,
                          .category = look.name,
                          .label = operation.name,
                          .inside = operation.name,
                          .tip = cat(name, ", round ", timed.round,
                                     timed.parts.empty() ? "" : cat(", turn ", timed.turn), ", ",
                                     ms(timed.begin), " to ", ms(timed.end)),
                          .colour = timed.round % 2 == 0 ? look.even : look.odd,
                          .outline = is_critical ? kCritical : "white",
                          .round = timed.round,
                          .depth = int(timed.parts.size())});
    }
  }
  for (size_t kind = 0; kind < kLooks.size(); ++kind)
    if (used[kind]) chart.legend.push_back({kLooks[kind].even, kLooks[kind].name});
  if (!critical.empty()) chart.legend.push_back({kCritical, "critical path (outline)"});
  return chart;
}

}  // namespace

std::string draw_text(const Program& program, const Replayed& replayed, int columns) {
  return draw_text(chart_of(program, replayed), columns);
}

std::string draw_svg(const Program& program, const Replayed& replayed) {
  return draw_svg(chart_of(program, replayed));
}

void write_trace(const Program& program, const Replayed& replayed, std::ostream& out) {
  write_trace(chart_of(program, replayed), 1e6, out);
}

}  // namespace yoke::plan
