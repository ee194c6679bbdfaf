// SPDX-License-Identifier: Apache-2.0
// Bars in rows, time to the right: what the pictures of schedules and of programs share.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace yoke::plan {

struct Bar {
  double begin = 0, end = 0;
  std::string name = {};      // in a trace
  std::string category = {};  // in a trace
  std::string label = {};     // in a terminal
  std::string inside = {};    // in a picture, where there is room
  std::string tip = {};       // in a picture, under the pointer
  std::string colour = {};
  std::string outline = "white";
  int64_t round = -1;  // in a trace; -1: of none
  int depth = 0;       // in a picture: lower, so that what it is inside of is seen above it
};

struct Chart {
  struct Row {
    std::string name = {};
    std::vector<Bar> bars = {};
  };
  struct Key {
    std::string colour = {}, text = {};
  };
  std::string title = {};
  std::vector<Key> legend = {};
  std::vector<Row> rows = {};
  double length = 0;   // from 0 to the end of the last bar
  bool clips = false;  // a label without room is cut, not only its first letter repeated
};

// Dots are idle time.
std::string draw_text(const Chart& chart, int columns);
// One self-contained picture.
std::string draw_svg(const Chart& chart);
// JSON that Perfetto and chrome://tracing open, each row a process.
void write_trace(const Chart& chart, double us_per_unit, std::ostream& out);

}  // namespace yoke::plan
