// SPDX-License-Identifier: Apache-2.0
// `yoke trace`: where the time of a run's traced steps went, rank by rank.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace yoke::cli {

void add_trace(CLI::App& app);
std::string trace_name(int process);  // "trace.json" of the first, then "trace-1.json"

// One rank's time in seconds, each moment once: what lies inside of another span is taken from it.
struct RankTime {
  int rank = 0;
  double compute = 0, comm = 0, bubble = 0, data = 0, idle = 0;
  std::string picture = {};  // a letter for each piece of the time
};
// Of a text as Tracer::write_chrome_trace makes it, or several. Throws Kind::Io if it is not one.
std::vector<RankTime> analyse_trace(const std::vector<std::string>& texts, int columns);

}  // namespace yoke::cli
