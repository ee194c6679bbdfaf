// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "yoke/base/error.h"

namespace yoke {
namespace {

// At most three significant digits, without a trailing ".0".
std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 9.995 ? "%.2f" : value < 99.95 ? "%.1f" : "%.0f", value);
  std::string result = text;
  if (result.find('.') != std::string::npos) {
    result.erase(result.find_last_not_of('0') + 1);
    if (result.back() == '.') result.pop_back();
  }
  return result;
}

// Splits "1.5GiB" into 1.5 and "GiB".
std::optional<std::pair<double, std::string_view>> number_and_unit(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number) || number < 0) return std::nullopt;
  std::string_view unit = text.substr(end - text.data());
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  return std::pair(number, unit);
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replace});
    }
  }
  return row.back();
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
  static constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = double(bytes);
  size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return cat(short_number(value), " ", kUnits[unit]);
}

std::string duration_text(Duration duration) {
  const double ns = double(duration.count());
  if (ns < 0) return "-" + duration_text(duration == Duration::min() ? Duration::max() : -duration);
  if (ns < 999.5) return cat(duration.count(), " ns");
  if (ns < 999.5e3) return short_number(ns / 1e3) + " us";
  if (ns < 999.5e6) return short_number(ns / 1e6) + " ms";
  if (ns < 59.95e9) return short_number(ns / 1e9) + " s";
  const int64_t seconds = int64_t(std::llround(ns / 1e9));
  if (seconds < 3600) return cat(seconds / 60, " min ", seconds % 60, " s");
  return cat(seconds / 3600, " h ", seconds / 60 % 60, " min");
}

std::optional<uint64_t> parse_bytes(std::string_view text) {
  const auto parsed = number_and_unit(text);
  if (!parsed) return std::nullopt;
  auto [number, unit] = *parsed;
  double scale = 1;
  if (!unit.empty() && unit != "B") {
    static constexpr std::string_view kPrefixes = "kmgt";
    const auto power = kPrefixes.find(char(std::tolower(static_cast<unsigned char>(unit.front()))));
    if (power == std::string_view::npos) return std::nullopt;
    const std::string_view rest = unit.substr(1);
    if (rest != "" && rest != "B" && rest != "iB" && rest != "i") return std::nullopt;
    scale = std::ldexp(1.0, 10 * int(power + 1));
  }
  const double value = number * scale;
  if (value >= 0x1p63 || value != std::floor(value)) return std::nullopt;
  return uint64_t(value);
}

std::optional<Duration> parse_duration(std::string_view text) {
  static constexpr std::array<std::pair<std::string_view, double>, 8> kUnits = {{{"", 1e9},
                                                                                 {"ns", 1},
                                                                                 {"us", 1e3},
                                                                                 {"ms", 1e6},
                                                                                 {"s", 1e9},
                                                                                 {"min", 60e9},
                                                                                 {"m", 60e9},
                                                                                 {"h", 3600e9}}};
  const auto parsed = number_and_unit(text);
  if (!parsed) return std::nullopt;
  for (const auto& [unit, scale] : kUnits)
    if (parsed->second == unit && parsed->first * scale < 0x1p62)
      return Duration(Duration::rep(std::llround(parsed->first * scale)));
  return std::nullopt;
}

std::optional<int64_t> parse_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (const auto& part : parts) {
    if (&part != &parts.front()) text += separator;
    text += part;
  }
  return text;
}

std::vector<std::string> nearest(std::string_view name,
                                 const std::vector<std::string>& candidates) {
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const auto& candidate : candidates) {
    const bool prefix = !name.empty() && candidate.starts_with(name);
    const size_t distance = prefix ? 1 : edit_distance(name, candidate);
    if (distance <= std::max<size_t>(1, (name.size() + 1) / 3))
      ranked.emplace_back(distance, candidate);
  }
  std::ranges::stable_sort(ranked, {}, &std::pair<size_t, std::string>::first);
  std::vector<std::string> result;
  for (size_t i = 0; i < std::min<size_t>(3, ranked.size()); ++i)
    result.push_back(ranked[i].second);
  return result;
}

}  // namespace yoke
