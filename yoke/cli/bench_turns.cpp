// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_turns.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "yoke/base/clock.h"
#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/observe/progress.h"

namespace yoke::cli {
namespace {

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

}  // namespace

std::vector<std::string> words(const std::string& option, const std::string& text,
                               const std::vector<std::string>& known) {
  auto list = split(text, ',');
  for (const auto& word : list) {
    if (std::ranges::count(known, word)) continue;
    const auto close = nearest(word, known);
    fail(Kind::Usage, option, ": '", word, "' is not one of ", join(known, ", "),
         close.empty() ? "" : "; did you mean " + close.front() + "?");
  }
  return list;
}

Turns::Turns(const std::vector<std::string>& names,
             const std::function<std::unique_ptr<Trainer>(const std::string&)>& make, int rounds,
             int steps, const std::string& what)
    : times_(names.size()) {
  const SteadyClock clock;
  observe::Progress progress(std::cerr, clock,
                             {.label = "bench",
                              .total = names.size() * uint64_t(rounds + 1),
                              .unit = "rounds",
                              .is_terminal = ::isatty(2) == 1});
  uint64_t done = 0;
  std::vector<int> counts;
  for (const auto& name : names) {
    trainers_.push_back(make(name));
    const int few = 3;
    const double seconds = trainers_.back()->round(few) / few;
    counts.push_back(steps > 0 ? steps : std::max(3, int(1.0 / seconds)));
    progress.update(++done, cat(what, " ", name));
  }
  for (int round = 0; round < rounds; ++round)
    for (size_t i = 0; i < names.size(); ++i) {
      times_[i].push_back(trainers_[i]->round(counts[i]) * 1e3 / counts[i]);
      progress.update(++done, cat(what, " ", names[i]));
    }
}

double Turns::ms(size_t i) const { return median(times_[i]); }

double Turns::ratio(size_t i, size_t other) const {
  std::vector<double> ratios;
  for (size_t round = 0; round < times_[i].size(); ++round)
    ratios.push_back(times_[other][round] / times_[i][round]);
  return median(ratios);
}

}  // namespace yoke::cli
