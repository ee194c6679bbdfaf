// SPDX-License-Identifier: Apache-2.0
// What `yoke top` shows. A server tells how much it has done since its start (Service::view); shown
// is the difference of two such views, as JSON and as lines of text. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace yoke::cli {

// JSON of what was done between two views, which are JSON too: the later one with "_per_s" and the
// like in place of what counts from the start. A thing that is new, or counts anew, began at 0.
// Throws Kind::Io where they are no views.
std::string rates_between(const std::string& before, const std::string& now);

struct TopScreen {
  size_t columns = SIZE_MAX, rows = SIZE_MAX;  // what does not fit is left out
  bool colour = false;
  std::string trouble = {};  // why the rates are old
};
// The lines of a picture of rates_between()'s JSON.
std::vector<std::string> draw_top(const std::string& url, const std::string& rates,
                                  const TopScreen& screen);

}  // namespace yoke::cli
