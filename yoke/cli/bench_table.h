// SPDX-License-Identifier: Apache-2.0
// Figures next to their targets, a line each, as `yoke bench serve` and `yoke flow bench` print
// them. A target that is missed, or a wrong answer, makes the verb fail in the end.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/topo/device.h"

namespace yoke::cli {

struct Figure {
  std::string bench = {}, what = {}, unit = {};
  double got = 0;
  std::optional<double> least = {}, most = {};  // the target
  std::vector<std::pair<std::string, double>> more = {};
  std::string bottleneck = {};  // a sentence, where one is known
  bool passed() const { return (!least || got >= *least) && (!most || got <= *most); }
};

struct BenchTable {
  std::vector<std::string> peers = {};
  double seconds = 10;  // of a measurement
  bool json = false;
  topo::Device device = {};  // of flows, and of replicas of a real model
  uint64_t wrong = 0;        // answers, of all
  int missed = 0;            // targets

  Duration length() const { return Duration(int64_t(seconds * 1e9)); }
  void begin() const;  // the machine, and the head of the table
  void report(const Figure& figure);
  void skip(const std::string& bench, const std::string& what, const std::string& why) const;
  void end() const;  // throws where an answer was wrong or a target was missed
};

// Those of the benches that were asked for, in their order; none: all.
using Benches = std::vector<std::pair<std::string, std::function<void(BenchTable&)>>>;
void run_benches(BenchTable& table, const Benches& benches, std::vector<std::string> what);

}  // namespace yoke::cli
