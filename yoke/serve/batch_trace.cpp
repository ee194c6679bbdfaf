// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/batch_trace.h"

#include <algorithm>

#include "yoke/observe/json_lines.h"

namespace yoke::serve {

void BatchTrace::add(const BatchSpan& span) {
  if (most_ == 0) return;
  if (spans_.size() < most_)
    spans_.push_back(span);
  else
    spans_[next_] = span;
  next_ = (next_ + 1) % most_;
}

std::string BatchTrace::json() const {
  std::vector<observe::JsonObject> events;
  for (const auto& span : spans_) {
    const auto add = [&](const char* name, const char* category, int64_t begin, int64_t end) {
      events.push_back({{"ph", "X"},
                        {"name", name},
                        {"cat", category},
                        {"pid", span.replica + 2},  // as observe's tracer numbers ranks
                        {"tid", 1},
                        {"ts", double(begin) / 1e3},
                        {"dur", double(end - begin) / 1e3},
                        {"args", observe::JsonObject({{"rows", span.rows}})}});
    };
    add("inputs", "data", span.sealed_at, span.begun_at);
    add("model", "compute", span.begun_at, span.computed_at);
    const int64_t copied_at = std::max(span.begun_at, span.computed_at - span.copies);
    if (span.copy_in > 0) add("copy in", "comm", copied_at, copied_at + span.copy_in);
    if (span.copy_out > 0)
      add("copy out", "comm", span.computed_at - span.copy_out, span.computed_at);
    add("outputs", "comm", span.computed_at, span.done_at);
  }
  return observe::JsonObject({{"traceEvents", events}}).text();
}

}  // namespace yoke::serve
