// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/plan.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

const std::vector<std::string> kKeys = {"pp",     "dp",     "tp",   "schedule",
                                        "micro",  "chunks", "zero", "sequence",
                                        "layers", "split",  "tie",  "partial"};
const std::vector<std::string> kKinds = {"outputs", "inputs", "words", "heads"};  // as SplitRule's

int64_t number(const std::string& word, const std::string& text) {
  const auto value = parse_int(text);
  constexpr int64_t kMost = 1 << 24;
  if (!value || *value < 0 || *value > kMost)
    fail(Kind::Config, "plan: '", word, "': '", text, "' is not a number from 0 to ", kMost);
  return *value;
}

template <typename Number>
std::vector<Number> numbers(const std::string& word, const std::string& text) {
  std::vector<Number> result;
  for (const auto& part : split(text, ',')) result.push_back(Number(number(word, part)));
  return result;
}

template <typename Number>
std::string list(const std::vector<Number>& values) {
  std::vector<std::string> words;
  for (const auto value : values) words.push_back(cat(value));
  return join(words, ",");
}

SplitRule rule(const std::string& word, const std::string& text) {
  const auto parts = split(text, ':');
  const auto kind = parts.size() < 2 ? kKinds.end() : std::ranges::find(kKinds, parts[1]);
  if (kind == kKinds.end() || parts.size() > 3 || parts[0].empty())
    fail(Kind::Config, "plan: '", word, "' is not split=PATTERN:KIND[:PARTS] with a kind of ",
         join(kKinds, ", "));
  SplitRule result{.pattern = parts[0], .kind = SplitRule::Kind(kind - kKinds.begin())};
  if (parts.size() == 3 && result.kind != SplitRule::Kind::Outputs)
    fail(Kind::Config, "plan: '", word, "': only outputs have parts");
  if (parts.size() == 3) result.parts = numbers<int64_t>(word, parts[2]);
  return result;
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*')
    return !name.empty() && pattern[0] == name[0] && matches(pattern.substr(1), name.substr(1));
  for (size_t i = 0; i <= name.size(); ++i)
    if (matches(pattern.substr(1), name.substr(i))) return true;
  return false;
}

void Plan::check(int ranks, int layers) const {
  const bool sane = std::min({pp, dp, tp}) >= 1 && std::max({pp, dp, tp}) <= ranks;
  if (!sane || int64_t(pp) * dp * tp != ranks)
    fail(Kind::Config, "plan: pp x dp x tp = ", pp, " x ", dp, " x ", tp, " = ",
         int64_t(pp) * dp * tp, " ranks, and there are ", ranks);
  if (zero < 0 || zero > 3) fail(Kind::Config, "plan: zero is 0 to 3, got ", zero);
  if (sequence && tp == 1)
    fail(Kind::Config, "plan: sequence=yes cuts tokens over the ranks of a layer, and tp is 1");
  int stages = 0;
  try {
    stages = make_schedule(schedule, shape()).num_stages();
  } catch (const Error& error) {
    fail(Kind::Config, "plan: ", error.what());
  }
  if (stages > layers)
    fail(Kind::Config, "plan: ", schedule, " with pp = ", pp, " has ", stages,
         " stages, and the model ", layers, " layers");
  const int sum = std::accumulate(layers_per_stage.begin(), layers_per_stage.end(), 0);
  const bool empty = std::ranges::count(layers_per_stage, 0) > 0;
  if (!layers_per_stage.empty() &&
      (int(layers_per_stage.size()) != stages || sum != layers || empty))
    fail(Kind::Config, "plan: layers=", list(layers_per_stage), " are ", layers_per_stage.size(),
         " stages with ", sum, " layers; the schedule has ", stages, " and the model ", layers,
         ", and no stage is empty");
  std::vector<std::string> tied;
  for (const auto& names : ties)
    for (const auto& name : names) {
      if (std::ranges::count(tied, name))
        fail(Kind::Config, "plan: '", name, "' is tied twice; name all that are one in one tie=");
      tied.push_back(name);
    }
}

std::string to_text(const Plan& plan) {
  const Plan usual;
  std::vector<std::string> words;
  auto say = [&](const char* key, const auto& value, const auto& other) {
    if (value != other) words.push_back(cat(key, "=", value));
  };
  say("pp", plan.pp, usual.pp);
  say("dp", plan.dp, usual.dp);
  say("tp", plan.tp, usual.tp);
  say("schedule", plan.schedule, usual.schedule);
  say("micro", plan.micro_batches, usual.micro_batches);
  say("chunks", plan.chunks, usual.chunks);
  say("zero", plan.zero, usual.zero);
  if (plan.sequence) words.emplace_back("sequence=yes");
  if (!plan.layers_per_stage.empty()) words.push_back("layers=" + list(plan.layers_per_stage));
  for (const auto& [pattern, kind, parts] : plan.splits)
    words.push_back(
        cat("split=", pattern, ":", kKinds[size_t(kind)], parts.empty() ? "" : ":" + list(parts)));
  for (const auto& names : plan.ties) words.push_back("tie=" + join(names, ","));
  for (const auto& pattern : plan.partial) words.push_back("partial=" + pattern);
  return join(words, " ");
}

Plan parse_plan(std::string_view text) {
  Plan plan;
  std::set<std::string> seen;
  std::string spaced(text);
  std::ranges::replace_if(
      spaced, [](char c) { return c == '\n' || c == '\t'; }, ' ');
  for (const auto& word : split(spaced, ' ')) {
    if (word.empty()) continue;
    const size_t at = word.find('=');
    const std::string key = word.substr(0, at), value = at == word.npos ? "" : word.substr(at + 1);
    if (value.empty() || !std::ranges::count(kKeys, key)) {
      const auto close = nearest(key, kKeys);
      fail(Kind::Config, "plan: '", word, "' is not key=value with a key of ", join(kKeys, ", "),
           close.empty() ? "" : "; did you mean " + close.front() + "?");
    }
    const bool many = key == "split" || key == "tie" || key == "partial";
    if (!many && !seen.insert(key).second) fail(Kind::Config, "plan: ", key, " is said twice");
    if (key == "pp") plan.pp = int(number(word, value));
    if (key == "dp") plan.dp = int(number(word, value));
    if (key == "tp") plan.tp = int(number(word, value));
    if (key == "schedule") plan.schedule = value;
    if (key == "micro") plan.micro_batches = int(number(word, value));
    if (key == "chunks") plan.chunks = int(number(word, value));
    if (key == "zero") plan.zero = int(number(word, value));
    if (key == "layers") plan.layers_per_stage = numbers<int>(word, value);
    if (key == "split") plan.splits.push_back(rule(word, value));
    if (key == "tie") plan.ties.push_back(split(value, ','));
    if (key == "partial") plan.partial.push_back(value);
    if (key != "sequence") continue;
    if (value != "yes" && value != "no")
      fail(Kind::Config, "plan: '", word, "' is neither sequence=yes nor sequence=no");
    plan.sequence = value == "yes";
  }
  return plan;
}

}  // namespace yoke::plan
