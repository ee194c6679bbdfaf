// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/chart.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/observe/json_lines.h"

namespace yoke::plan {
namespace {

// XML has no control characters, not even as escapes.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += uint8_t(c) < 0x20 ? ' ' : c;
    }
  return result;
}

// One column each: no control characters, and nothing that takes several bytes.
std::string plain(const std::string& text) {
  std::string result;
  for (const char c : text)
    if ((uint8_t(c) & 0xC0) != 0x80) result += c < 0x20 || c > 0x7E ? '?' : c;
  return result;
}

double shortest(const Chart& chart) {
  double least = chart.length;
  for (const auto& row : chart.rows)
    for (const auto& bar : row.bars)
      if (bar.end > bar.begin) least = std::min(least, bar.end - bar.begin);
  return least > 0 ? least : 1;
}

size_t longest_name(const Chart& chart) {
  size_t longest = 0;
  for (const auto& row : chart.rows) longest = std::max(longest, plain(row.name).size());
  return longest;
}

}  // namespace

std::string draw_text(const Chart& chart, int columns) {
  const int head_columns = std::clamp(int(longest_name(chart)) + 2, 9, 32);
  // Wide enough for the labels where that fits.
  const double roomy = 4 / shortest(chart), most = std::max(20, columns - head_columns - 1);
  const double scale = chart.length > 0 ? std::min(roomy, most / chart.length) : 0;
  auto column = [&](double time) { return size_t(std::lround(time * scale)); };
  std::string text;
  for (const auto& row : chart.rows) {
    std::string line(column(chart.length), '.');
    for (const auto& bar : row.bars) {
      const size_t first = column(bar.begin), last = std::max(column(bar.end), first + 1);
      const std::string label = bar.label.empty() ? "?" : plain(bar.label);
      const bool fits = label.size() <= last - first;
      for (size_t i = first; i < std::min(last, line.size()); ++i) {
        const size_t place = i - first;
        if (fits)
          line[i] = place < label.size() ? label[place] : '-';
        else
          line[i] = label[chart.clips ? place : 0];
      }
    }
    std::string head = plain(row.name).substr(0, size_t(head_columns) - 2);
    head.resize(size_t(head_columns), ' ');
    text += cat(head, line, "\n");
  }
  return text;
}

std::string draw_svg(const Chart& chart) {
  constexpr double kTop = 56, kHeight = 26, kGap = 6;
  const double left = std::max(70.0, 16 + 7 * double(longest_name(chart)));
  const double scale =
      chart.length > 0 ? std::clamp(28 / shortest(chart), 4 / chart.length, 12000 / chart.length)
                       : 0;
  const double width = left + chart.length * scale + 20,
               height = kTop + double(chart.rows.size()) * (kHeight + kGap) + 24;
  std::ostringstream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" font-size=\"11\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << "<text x=\"" << left << "\" y=\"20\" font-size=\"14\">" << escaped(chart.title)
      << "</text>\n";
  double x = left;
  for (const auto& key : chart.legend) {
    out << "<rect x=\"" << x << "\" y=\"30\" width=\"12\" height=\"12\" fill=\"" << key.colour
        << "\"/><text x=\"" << x + 16 << "\" y=\"40\">" << escaped(key.text) << "</text>\n";
    x += 150;
  }
  double y = kTop;
  for (const auto& row : chart.rows) {
    out << "<text x=\"8\" y=\"" << y + 17 << "\">" << escaped(row.name) << "</text><rect x=\""
        << left << "\" y=\"" << y << "\" width=\"" << chart.length * scale << "\" height=\""
        << kHeight << "\" fill=\"#eeeeee\"/>\n";
    for (const auto& bar : row.bars) {
      const double from = left + bar.begin * scale, long_ = (bar.end - bar.begin) * scale;
      const double down = std::min(7.0 * bar.depth, kHeight - 5);
      out << "<rect x=\"" << from << "\" y=\"" << y + down << "\" width=\"" << long_
          << "\" height=\"" << kHeight - down << "\" fill=\"" << bar.colour << "\" stroke=\""
          << bar.outline << "\"><title>" << escaped(bar.tip) << "</title></rect>";
      if (long_ > std::max(14.0, 6.5 * double(plain(bar.inside).size())))
        out << "<text x=\"" << from + long_ / 2 << "\" y=\"" << y + 17 + down / 4
            << "\" text-anchor=\"middle\">" << escaped(bar.inside) << "</text>";
      out << "\n";
    }
    y += kHeight + kGap;
  }
  out << "</svg>\n";
  return out.str();
}

void write_trace(const Chart& chart, double us_per_unit, std::ostream& out) {
  using observe::JsonObject;
  const char* separator = "\n";
  auto write = [&](const JsonObject& object) {
    out << separator << object.text();
    separator = ",\n";
  };
  out << R"({"displayTimeUnit":"ms","traceEvents":[)";
  int pid = 0;
  for (const auto& row : chart.rows) {
    ++pid;
    write({{"name", "process_name"},
           {"ph", "M"},
           {"pid", pid},
           {"tid", 0},
           {"args", JsonObject{{"name", row.name}}}});
    for (const auto& bar : row.bars) {
      JsonObject event{{"name", bar.name},
                       {"cat", bar.category},
                       {"ph", "X"},
                       {"pid", pid},
                       {"tid", 0},
                       {"ts", bar.begin * us_per_unit},
                       {"dur", (bar.end - bar.begin) * us_per_unit}};
      if (bar.round >= 0) event.add("args", JsonObject{{"round", bar.round}});
      write(event);
    }
  }
  out << "\n]}\n";
}

}  // namespace yoke::plan
