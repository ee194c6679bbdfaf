// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_table.h"

#include <algorithm>
#include <cstdio>
#include <iostream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/environment.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value >= 1000 ? "%.0f" : value >= 10 ? "%.1f" : "%.3g", value);
  return text;
}

std::string target_of(const Figure& figure) {
  if (figure.least && figure.most) return number(*figure.least) + " to " + number(*figure.most);
  if (figure.least) return ">= " + number(*figure.least);
  return figure.most ? "<= " + number(*figure.most) : "";
}

}  // namespace

void BenchTable::begin() const {
  if (json) return;
  const auto host = read_visible_host(read_environment());
  std::printf("On %s, %d CPUs:\n\n", host.name.c_str(), host.num_usable_cpus);
  std::printf(
      "| %-9s | %-48s | %12s | %-12s | %-6s | %s |\n|%s|\n", "bench", "what", "got", "target",
      "passed", "more",
      "-----------|--------------------------------------------------|-------------:|--------"
      "------|--------|---");
  std::fflush(stdout);
}

void BenchTable::report(const Figure& figure) {
  const std::string target = target_of(figure);
  missed += !figure.passed();
  if (json) {
    observe::JsonObject line{
        {"bench", figure.bench}, {"what", figure.what}, {"got", figure.got}, {"unit", figure.unit}};
    if (figure.least) line.add("least", *figure.least);
    if (figure.most) line.add("most", *figure.most);
    if (!target.empty()) line.add("passed", figure.passed());
    for (const auto& [name, value] : figure.more) line.add(name, value);
    if (!figure.bottleneck.empty()) line.add("bottleneck", figure.bottleneck);
    observe::JsonLines(std::cout).write(line);
    return;
  }
  std::vector<std::string> more;
  for (const auto& [name, value] : figure.more) more.push_back(name + " " + number(value));
  if (!figure.bottleneck.empty()) more.push_back("bottleneck: " + figure.bottleneck);
  std::printf(
      "| %-9s | %-48s | %12s | %-12s | %-6s | %s |\n", figure.bench.c_str(), figure.what.c_str(),
      (number(figure.got) + (figure.unit.empty() ? "" : " " + figure.unit)).c_str(), target.c_str(),
      target.empty()    ? ""
      : figure.passed() ? "yes"
                        : "MISSED",
      join(more, ", ").c_str());
  std::fflush(stdout);
}

void BenchTable::skip(const std::string& name, const std::string& what,
                      const std::string& why) const {
  std::fprintf(stderr, "bench: %s: %s is left out: %s\n", name.c_str(), what.c_str(), why.c_str());
  if (json)
    observe::JsonLines(std::cout).write({{"bench", name}, {"what", what}, {"skipped", why}});
}

void BenchTable::end() const {
  if (wrong > 0) fail(Kind::Internal, wrong, " answers were wrong; wanted none");
  if (missed > 0)
    fail(Kind::Internal, missed, " figures missed their targets; wanted none, see ",
         json ? "\"passed\":false" : "MISSED");
}

void run_benches(BenchTable& table, const Benches& benches, std::vector<std::string> what) {
  std::vector<std::string> known{"all"};
  for (const auto& [name, function] : benches) known.push_back(name);
  if (what.empty()) what = {"all"};
  for (const auto& word : what) words("WHAT", word, known);
  if (!(table.seconds >= 1 && table.seconds <= 600))
    fail(Kind::Usage, "--seconds wants 1 to 600, got ", table.seconds);
  const auto asked = [&](const std::string& name) { return std::ranges::count(what, name) > 0; };
  table.begin();
  for (const auto& [name, function] : benches) {
    if (!asked(name) && !asked("all")) continue;
    std::fprintf(stderr, "bench: %s\n", name.c_str());
    function(table);
  }
  table.end();
}

}  // namespace yoke::cli
