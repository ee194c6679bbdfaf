// SPDX-License-Identifier: Apache-2.0
// What a run tells its user, one line at a time: time (UTC), level, rank, message, fields.
//
//   log.info("saved", {{"step", 500}, {"path", path}});
//   2026-03-01T09:30:00.250Z info    rank 0: saved  step=500 path=runs/a
//   {"time":"2026-03-01T09:30:00.250Z","level":"info","rank":0,"message":"saved","step":500,…}
//
// A Log is a small handle, copied freely; logging never throws. Only rank 0 speaks below warning;
// rank -1 is a program without ranks, of which none is named.
// Threads: any.
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string_view>

#include "yoke/observe/json_lines.h"

namespace yoke::observe {

enum class Level { Debug, Info, Warning, Error, Off };

struct LogOptions {
  Level level = Level::Info;
  Level other_ranks = Level::Warning;  // what other ranks than 0 need besides, to be heard
  bool json = false;                   // one JSON object per line
  // Gets each line without its end, one at a time; must not log. Empty: standard error, with
  // colours on a terminal.
  std::function<void(std::string_view line)> sink = {};
  std::function<std::chrono::system_clock::time_point()> now = std::chrono::system_clock::now;
};

class Log {
 public:
  using Fields = std::initializer_list<JsonField>;

  explicit Log(LogOptions options = {}, int rank = 0);
  // The same log, spoken to by another rank.
  Log for_rank(int rank) const;

  bool speaks(Level level) const;
  void write(Level level, std::string_view message, Fields fields = {}) const;
  void debug(std::string_view message, Fields fields = {}) const {
    write(Level::Debug, message, fields);
  }
  void info(std::string_view message, Fields fields = {}) const {
    write(Level::Info, message, fields);
  }
  void warning(std::string_view message, Fields fields = {}) const {
    write(Level::Warning, message, fields);
  }
  void error(std::string_view message, Fields fields = {}) const {
    write(Level::Error, message, fields);
  }

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
  int rank_;
};

}  // namespace yoke::observe
