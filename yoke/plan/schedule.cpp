// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/schedule.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

// By the number of the act.
constexpr std::array<std::string_view, 13> kNames = {
    "F",      "I",       "W",       "B",           "SEND_F",    "RECV_F",  "SEND_B",
    "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "RECOMPUTE", "OPT_STEP"};
constexpr std::string_view kMark = "# schedule ";

bool has_micro(Act act) { return act < Act::Unshard || act == Act::Recompute; }

// The number that the text begins with, and takes it away.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || text[0] == '-') return std::nullopt;
  text.remove_prefix(size_t(end - text.data()));
  return number;
}

}  // namespace

std::string to_text(const Action& action) {
  std::string text;
  if (action.stage >= 0) text += cat(action.stage);
  text += kNames[size_t(action.act)];
  if (action.micro >= 0) text += cat(action.micro);
  return text;
}

std::optional<Action> parse_action(std::string_view text) {
  Action action;
  if (const auto stage = take_number(text)) action.stage = *stage;
  const size_t length = std::min(text.find_first_of("0123456789"), text.size());
  const auto name = std::ranges::find(kNames, text.substr(0, length));
  if (name == kNames.end()) return std::nullopt;
  action.act = Act(name - kNames.begin());
  text.remove_prefix(length);
  if (const auto micro = take_number(text)) action.micro = *micro;
  return text.empty() && action.well_formed() ? std::optional(action) : std::nullopt;
}

bool Action::well_formed() const {
  return (stage >= 0) == (act != Act::OptStep) && (micro >= 0) == has_micro(act);
}

size_t Schedule::num_actions() const {
  size_t count = 0;
  for (const auto& row : rows) count += row.size();
  return count;
}

std::string to_csv(const Schedule& schedule) {
  std::string text = cat(kMark, schedule.name, "\n");
  for (const auto& row : schedule.rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) text += ",";
      text += to_text(row[i]);
    }
    text += "\n";
  }
  return text;
}

Schedule parse_csv(std::string_view text) {
  Schedule schedule;
  std::vector<std::pair<int, int>> found;  // stage, rank
  size_t number = 0;
  while (text.ends_with('\n') || text.ends_with('\r')) text.remove_suffix(1);
  for (auto& line : split(text, '\n')) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.starts_with(kMark)) schedule.name = line.substr(kMark.size());
    if (line.starts_with('#')) continue;
    auto& row = schedule.rows.emplace_back();
    for (auto word : split(line, ',')) {
      const size_t first = word.find_first_not_of(" \t"), last = word.find_last_not_of(" \t");
      if (first == std::string::npos) continue;  // an idle place
      word = word.substr(first, last - first + 1);
      const auto action = parse_action(word);
      if (!action)
        fail(
            Kind::Usage, "line ", number, ": '", word,
            "' is no action; one is a stage, a kind and a micro-batch, such as 2F0, 3I1, 3W1, 2B0, "
            "3SEND_F1, or a stage and UNSHARD, RESHARD, REDUCE_GRAD, or OPT_STEP");
      if (action->stage >= kMaxStages || action->micro >= kMaxMicro)
        fail(Kind::Usage, "line ", number, ": '", word, "': there are up to ", kMaxStages,
             " stages and ", kMaxMicro, " micro-batches");
      row.push_back(*action);
      schedule.num_micro = std::max(schedule.num_micro, action->micro + 1);
      if (action->stage >= 0) found.emplace_back(action->stage, schedule.num_ranks() - 1);
    }
  }
  if (found.empty()) fail(Kind::Usage, "the schedule has no actions: one line for each rank");
  schedule.rank_of.assign(size_t(std::ranges::max(found).first) + 1, -1);
  for (const auto& [stage, rank] : found) {
    int& owner = schedule.rank_of[size_t(stage)];
    if (owner >= 0 && owner != rank)
      fail(Kind::Usage, "stage ", stage, " is on rank ", owner, " and on rank ", rank);
    owner = rank;
  }
  for (int stage = 0; stage < schedule.num_stages(); ++stage)
    if (schedule.rank_of[size_t(stage)] < 0)
      fail(Kind::Usage, "no rank has stage ", stage, " of ", schedule.num_stages());
  return schedule;
}

}  // namespace yoke::plan
