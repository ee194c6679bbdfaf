// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/draw.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/observe/json_lines.h"

namespace yoke::plan {
namespace {

// Which of its rank's stages it is, from 0.
int chunk_of(const Schedule& schedule, int stage) {
  const int rank = schedule.rank_of[size_t(stage)];
  return int(std::count(schedule.rank_of.begin(), schedule.rank_of.begin() + stage, rank));
}

std::string label(const Schedule& schedule, const Action& action) {
  std::string text = to_text({-1, action.act, -1});
  if (chunk_of(schedule, action.stage) > 0) text[0] = char(std::tolower(text[0]));
  return cat(text, action.micro);
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text)
    result += c == '<' ? "&lt;" : c == '&' ? "&amp;" : c == '>' ? "&gt;" : std::string(1, c);
  return result;
}

double shortest(const Simulation& simulation) {
  double least = simulation.makespan;
  for (const auto& row : simulation.rows)
    for (const auto& [action, begin, end] : row)
      if (action.takes_time() && end > begin) least = std::min(least, end - begin);
  return least;
}

}  // namespace

std::string draw_text(const Schedule& schedule, const Simulation& simulation, int columns) {
  // Wide enough for the labels where that fits.
  const double roomy = 4 / shortest(simulation);
  const double scale = std::min(roomy, std::max(20, columns - 10) / simulation.makespan);
  auto column = [&](double time) { return size_t(std::lround(time * scale)); };
  std::string text;
  for (size_t r = 0; r < simulation.rows.size(); ++r) {
    std::string line(column(simulation.makespan), '.');
    for (const auto& [action, begin, end] : simulation.rows[r]) {
      if (!action.takes_time()) continue;
      const size_t first = column(begin), last = std::max(column(end), first + 1);
      const std::string name = label(schedule, action);
      for (size_t i = first; i < std::min(last, line.size()); ++i) {
        const size_t place = i - first;
        const bool fits = name.size() <= last - first;
        line[i] = fits && place < name.size() ? name[place] : fits ? '-' : name[0];
      }
    }
    std::string head = cat("rank ", r);
    head.resize(9, ' ');
    text += cat(head, line, "\n");
  }
  return text;
}

std::string draw_svg(const Schedule& schedule, const Simulation& simulation) {
  constexpr double kLeft = 70, kTop = 56, kHeight = 26, kGap = 6;
  const double scale =
      std::clamp(28 / shortest(simulation), 4 / simulation.makespan, 12000 / simulation.makespan);
  const double width = kLeft + simulation.makespan * scale + 20,
               height = kTop + double(simulation.rows.size()) * (kHeight + kGap) + 24;
  std::ostringstream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" font-size=\"11\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << "<text x=\"" << kLeft << "\" y=\"20\" font-size=\"14\">" << escaped(schedule.name) << ": "
      << schedule.num_ranks() << " ranks, " << schedule.num_micro << " micro-batches, "
      << simulation.makespan << " units of time, " << std::lround(simulation.bubble * 1000) / 10.0
      << " % idle</text>\n";
  struct Colour {
    Act act;
    const char *first, *later, *name;
  };
  const Colour colours[] = {{Act::F, "#7aa6e0", "#b9d0f0", "forward"},
                            {Act::B, "#e8a15c", "#f3cda6", "backward"},
                            {Act::I, "#e8a15c", "#f3cda6", "backward of the input"},
                            {Act::W, "#7fbf8a", "#b9dfc0", "backward of the weights"},
                            {Act::Recompute, "#c9b3e6", "#e0d4f2", "forward again"}};
  double x = kLeft;
  for (const auto& colour : colours) {
    const bool used = std::ranges::any_of(simulation.rows, [&](const auto& row) {
      return std::ranges::any_of(row, [&](const auto& t) { return t.action.act == colour.act; });
    });
    if (!used) continue;
    out << "<rect x=\"" << x << "\" y=\"30\" width=\"12\" height=\"12\" fill=\"" << colour.first
        << "\"/><text x=\"" << x + 16 << "\" y=\"40\">" << colour.name << "</text>\n";
    x += 150;
  }
  for (size_t r = 0; r < simulation.rows.size(); ++r) {
    const double y = kTop + double(r) * (kHeight + kGap);
    out << "<text x=\"8\" y=\"" << y + 17 << "\">rank " << r << "</text><rect x=\"" << kLeft
        << "\" y=\"" << y << "\" width=\"" << simulation.makespan * scale << "\" height=\""
        << kHeight << "\" fill=\"#eeeeee\"/>\n";
    for (const auto& [action, begin, end] : simulation.rows[r]) {
      if (!action.takes_time()) continue;
      const auto* colour = std::ranges::find(colours, action.act, &Colour::act);
      const double left = kLeft + begin * scale, long_ = (end - begin) * scale;
      out << "<rect x=\"" << left << "\" y=\"" << y << "\" width=\"" << long_ << "\" height=\""
          << kHeight << "\" fill=\""
          << (chunk_of(schedule, action.stage) == 0 ? colour->first : colour->later)
          << "\" stroke=\"white\"><title>" << to_text(action) << ", " << begin << " to " << end
          << "</title></rect>";
      if (long_ > 14)
        out << "<text x=\"" << left + long_ / 2 << "\" y=\"" << y + 17
            << "\" text-anchor=\"middle\">" << action.micro << "</text>";
      out << "\n";
    }
  }
  out << "</svg>\n";
  return out.str();
}

void write_trace(const Simulation& simulation, std::ostream& out) {
  using observe::JsonObject;
  const char* separator = "\n";
  auto write = [&](const JsonObject& object) {
    out << separator << object.text();
    separator = ",\n";
  };
  out << R"({"displayTimeUnit":"ms","traceEvents":[)";
  for (size_t r = 0; r < simulation.rows.size(); ++r) {
    const int pid = int(r) + 1;
    write({{"name", "process_name"},
           {"ph", "M"},
           {"pid", pid},
           {"tid", 0},
           {"args", JsonObject{{"name", cat("rank ", r)}}}});
    for (const auto& [action, begin, end] : simulation.rows[r])
      write({{"name", to_text(action)},
             {"cat", action.computes() ? "compute" : "comm"},
             {"ph", "X"},
             {"pid", pid},
             {"tid", 0},
             {"ts", begin * 1000},
             {"dur", (end - begin) * 1000}});
  }
  out << "\n]}\n";
}

}  // namespace yoke::plan
