// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::observe {
namespace {

constexpr Duration kRedrawEvery = std::chrono::milliseconds(100);
constexpr uint64_t kBarWidth = 20;
constexpr const char* kClearToEnd = "\x1b[K";

// How many of `parts` equal parts of the job are complete. In integers: 29 of 100 is 29 %, where
// a double would say 28.999….
uint64_t complete(uint64_t done, uint64_t total, uint64_t parts) {
  return total == 0 ? parts : std::min(done, total) * parts / total;
}

// Three digits: 1.23, 12.3, 123, 1234.
std::string rate_text(double rate) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", rate < 9.995 ? 2 : rate < 99.95 ? 1 : 0, rate);
  return text;
}

std::string bar_text(uint64_t full) {
  std::string bar(full, '=');
  if (full < kBarWidth) bar += '>';
  bar.resize(kBarWidth, ' ');
  return '[' + bar + ']';
}

// At most `columns` bytes, never a part of a UTF-8 character.
std::string cut(std::string text, size_t columns) {
  if (text.size() <= columns) return text;
  while (columns > 0 && (uint8_t(text[columns]) & 0xC0) == 0x80) --columns;
  text.resize(columns);
  return text;
}

}  // namespace

Progress::Progress(std::ostream& out, const Clock& clock, ProgressOptions options)
    : out_(out),
      clock_(clock),
      options_(std::move(options)),
      start_(clock.now()),
      next_draw_(start_),
      next_tenth_(complete(options_.initial, options_.total, 10) + 1) {}

Progress::~Progress() {
  try {
    if (line_open_) out_ << std::endl;
  } catch (...) {  // a stream that throws must not end the program here
  }
}

std::string Progress::text(uint64_t done, std::string_view note) const {
  const auto& [label, total, initial, unit, is_terminal, columns, patience] = options_;
  const std::string percent = cat(complete(done, total, 100), " %");
  std::vector<std::string> parts;
  if (is_terminal)
    parts.push_back(cat(label, " ", bar_text(complete(done, total, kBarWidth)),
                        std::string(6 - percent.size(), ' '), percent));
  else
    parts.push_back(cat(label, ": ", percent));
  parts.push_back(cat(done, "/", total, " ", unit));

  const double seconds = std::chrono::duration<double>(clock_.now() - start_).count();
  if (done > initial && seconds > 0) {
    const double rate = double(done - initial) / seconds;
    parts.push_back(cat(rate_text(rate), " ", unit, "/s"));
    const double left = double(total - std::min(done, total)) / rate;
    if (done < total && left < 1e9)
      parts.push_back("ETA " + duration_text(std::chrono::seconds(int64_t(std::ceil(left)))));
    else if (done >= total)
      parts.push_back("in " + duration_text(clock_.now() - start_));
  }
  if (!note.empty()) parts.emplace_back(note);
  return join(parts, is_terminal ? "  " : ", ");
}

void Progress::update(uint64_t done, std::string_view note) {
  if (finished_ || clock_.now() - start_ < options_.patience) return;
  finished_ = done >= options_.total;
  if (!options_.is_terminal) {
    const uint64_t tenth = complete(done, options_.total, 10);
    if (tenth < next_tenth_ && !finished_) return;
    next_tenth_ = tenth + 1;
    out_ << text(done, note) << std::endl;
    return;
  }
  const Time now = clock_.now();
  if (now < next_draw_ && !finished_) return;
  next_draw_ = now + kRedrawEvery;
  // The last column stays free: a character there makes some terminals go to the next line.
  const size_t columns = std::max<size_t>(options_.columns, 1) - 1;
  out_ << '\r' << cut(text(done, note), columns) << kClearToEnd;
  line_open_ = !finished_;
  if (finished_) out_ << '\n';
  out_ << std::flush;
}

}  // namespace yoke::observe
