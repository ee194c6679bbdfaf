// SPDX-License-Identifier: Apache-2.0
// What a knot tells people, and the change that would undo it.
#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/plan/prove.h"

namespace yoke::plan {
namespace {

using Change = Suggestion::Kind;
constexpr size_t kMostTries = 2000;

std::string text_of(const Program& program, const Suggestion& s) {
  const auto& channel = s.channel < 0 ? Channel{} : program.channels[size_t(s.channel)];
  const auto operation = [&](size_t place) { return program.rows[size_t(s.queue)][place].name; };
  const auto on = [&] { return cat("on ", program.queues[size_t(s.queue)]); };
  switch (s.kind) {
    case Change::Tokens:
      return cat("let '", channel.name, "' hold ", s.value, s.value == 1 ? " value" : " values",
                 " before the first round");
    case Change::Capacity:
      return cat("give '", channel.name, "' a capacity of ", s.value);
    case Change::Swap:
      return cat(on(), ", swap ", operation(s.from), " and ", operation(s.to));
    case Change::Move:
      return cat(on(), ", do ", operation(s.from), s.to < s.from ? " before " : " after ",
                 operation(s.to));
    case Change::Count:
      return cat("let ", operation(s.from), s.gives ? " give " : " take ", s.value, " of '",
                 channel.name, "'");
    case Change::None:
      break;
  }
  return "";
}

// Changes to try, those first that change the least meaning.
class Candidates {
 public:
  Candidates(const Program& program, const Knot& knot) : program_(program), knot_(knot) {}

  std::vector<Suggestion> list() {
    switch (knot_.rule) {
      case Rule::Balance:
        balance();
        break;
      case Rule::Order:
        order();
        break;
      case Rule::Races:
        races();
        break;
      case Rule::Shapes:
        break;
      default:
        circle();
    }
    return std::move(list_);
  }

 private:
  void add(const Suggestion& suggestion) {
    if (list_.size() < kMostTries) list_.push_back(suggestion);
  }
  void capacity(int channel, int64_t value) {
    add({.kind = Change::Capacity, .channel = channel, .value = value});
  }
  void tokens(int channel, int64_t value) {
    add({.kind = Change::Tokens, .channel = channel, .value = value});
  }
  void reorder(Change kind, int queue, size_t from, size_t to) {
    add({.kind = kind, .queue = queue, .from = from, .to = to});
  }
  const Channel& channel(int place) const { return program_.channels[size_t(place)]; }
  // fn(queue, index, access, gives) for each end of a channel.
  template <typename Fn>
  void each_end(int place, Fn fn) const {
    for (size_t q = 0; q < program_.rows.size(); ++q)
      for (size_t i = 0; i < program_.rows[q].size(); ++i)
        for (const bool gives : {false, true})
          for (const auto& a : gives ? program_.rows[q][i].gives : program_.rows[q][i].takes)
            if (a.channel == place) fn(int(q), i, a, gives);
  }
  // Each place in the row, the nearest first.
  void moves(Knot::Place at) {
    const size_t size = program_.rows[size_t(at.queue)].size();
    for (size_t by = 1; by < std::min(size, kFar); ++by) {
      if (by <= at.index) reorder(Change::Move, at.queue, at.index, at.index - by);
      if (at.index + by < size) reorder(Change::Move, at.queue, at.index, at.index + by);
    }
    for (size_t by = 2; by < std::min(size, kFar); ++by) {
      if (by <= at.index) reorder(Change::Swap, at.queue, at.index - by, at.index);
      if (at.index + by < size) reorder(Change::Swap, at.queue, at.index, at.index + by);
    }
  }

  void circle() {
    const auto& steps = knot_.circle;
    for (size_t k = 0; k < steps.size(); ++k) {
      if (steps[k].rule != Rule::Data || steps[k].channel >= 0) continue;
      const size_t early = steps[(k + 1) % steps.size()].index, late = steps[k].index;
      reorder(Change::Swap, steps[k].queue, early, late);
      if (late == early + 1) continue;
      reorder(Change::Move, steps[k].queue, late, early);
      reorder(Change::Move, steps[k].queue, early, late);
    }
    for (const auto& step : steps)
      if (step.rule == Rule::Capacity)
        for (int64_t more = 1; more <= 8; ++more)
          capacity(step.channel, channel(step.channel).capacity + more);
    for (int64_t more = 1; more <= 4; ++more)
      for (const auto& step : steps)
        if (step.rule == Rule::Data && step.channel >= 0)
          tokens(step.channel, channel(step.channel).initial + more);
    for (const auto& step : steps) moves({step.queue, step.index});
    // Who gives or takes several, and when, says whose value each one is: any two may be at fault.
    std::set<int> queues;
    for (const auto& step : steps) queues.insert(step.queue);
    for (const int queue : queues)
      for (size_t by = 1; by < kFar; ++by)
        for (size_t i = 0; i + by < program_.rows[size_t(queue)].size() && i < kFar; ++i)
          reorder(Change::Swap, queue, i, i + by);
  }

  void balance() {
    const Channel& it = channel(knot_.channel);
    int64_t given = 0, taken = 0, most = std::max<int64_t>(1, it.initial);
    each_end(knot_.channel, [&](int, size_t, const Access& access, bool gives) {
      (gives ? given : taken) += access.count;
      most = std::max(most, access.count);
    });
    if (most > it.capacity) capacity(knot_.channel, most);
    if (it.initial > it.capacity) tokens(knot_.channel, it.capacity);
    if (it.initial < 0) tokens(knot_.channel, 0);
    each_end(knot_.channel, [&](int queue, size_t index, const Access& access, bool gives) {
      const int64_t count = access.count + (gives ? taken - given : given - taken);
      for (const int64_t value : {count, int64_t(1)})
        if (value >= 1 && value != access.count)
          add({.kind = Change::Count,
               .channel = knot_.channel,
               .queue = queue,
               .from = index,
               .value = value,
               .gives = gives});
    });
  }

  // What one end means stands elsewhere in the row of the other.
  void order() {
    if (knot_.places.size() != 2) return;
    std::array<std::vector<size_t>, 2> places;  // of the meetings that these two are of
    std::array<std::multiset<std::string>, 2> meanings;
    for (size_t k = 0; k < 2; ++k) {
      const auto& row = program_.rows[size_t(knot_.places[k].queue)];
      const Operation& it = row[knot_.places[k].index];
      for (size_t i = 0; i < row.size(); ++i)
        if (row[i].meets() && row[i].group == it.group && row[i].peer == it.peer &&
            (it.peer < 0 || row[i].kind == it.kind)) {
          places[k].push_back(i);
          meanings[k].insert(row[i].what);
        }
    }
    if (meanings[0] != meanings[1]) return;  // no order helps
    for (size_t k = 0; k < 2; ++k) {
      const auto [queue, index] = knot_.places[k];
      const auto& row = program_.rows[size_t(queue)];
      const auto [other_queue, other_index] = knot_.places[1 - k];
      for (const size_t i : places[k])
        if (i != index && row[i].what == program_.rows[size_t(other_queue)][other_index].what) {
          reorder(Change::Swap, queue, std::min(i, index), std::max(i, index));
          reorder(Change::Move, queue, i, index);
        }
    }
    for (size_t k = 0; k < 2; ++k)
      for (const size_t i : places[k]) moves({knot_.places[k].queue, i});
  }

  // Less freedom between the two queues, or another place in the row.
  void races() {
    std::vector<std::pair<int, int>> ends(program_.channels.size(), {-1, -1});
    for (size_t q = 0; q < program_.rows.size(); ++q)
      for (const auto& operation : program_.rows[q]) {
        for (const auto& access : operation.gives) ends[size_t(access.channel)].first = int(q);
        for (const auto& access : operation.takes) ends[size_t(access.channel)].second = int(q);
      }
    const auto about = [&](int queue) {
      return queue == knot_.places[0].queue || queue == knot_.places[1].queue;
    };
    for (int c = 0; c < int(ends.size()); ++c) {
      const auto [from, to] = ends[size_t(c)];
      if (from == to || !about(from) || !about(to) || !channel(c).waits) continue;
      const int64_t least = std::max<int64_t>(1, channel(c).initial);
      for (int64_t n = std::min(channel(c).capacity, least + 8); n-- > least;) capacity(c, n);
      for (int64_t n = std::min<int64_t>(channel(c).initial, 8); n-- > 0;) tokens(c, n);
    }
    for (const auto& place : knot_.places) moves(place);
  }

  static constexpr size_t kFar = 32;
  const Program& program_;
  const Knot& knot_;
  std::vector<Suggestion> list_;
};

const char* advice(Rule rule) {
  switch (rule) {
    case Rule::Shapes:
      return "change one of the two models, or put one between them that makes the other of it";
    case Rule::Races:
      return "let the second take a value that the first gives, or work on a copy";
    case Rule::Order:
      return "let each member of a meeting do the same ones, in the same order";
    case Rule::Balance:
      return "let one queue give to the channel and one take, as many values in a round";
    default:
      return "no single change of an order, a capacity or a first value undoes it";
  }
}

}  // namespace

Program apply(Program program, const Suggestion& s) {
  // The program is ours: what is looked for by its number may be changed.
  auto& part = const_cast<Program&>(*with_parts(program).at(size_t(s.part + 1)));
  auto* channel = s.channel < 0 ? nullptr : &part.channels.at(size_t(s.channel));
  auto* row = s.queue < 0 ? nullptr : &part.rows.at(size_t(s.queue));
  switch (s.kind) {
    case Change::Tokens:
      channel->initial = s.value;
      channel->capacity = std::max(channel->capacity, s.value);
      break;
    case Change::Capacity:
      channel->capacity = s.value;
      break;
    case Change::Swap:
      std::swap(row->at(s.from), row->at(s.to));
      break;
    case Change::Move: {
      const auto begin = row->begin(), from = begin + int64_t(s.from), to = begin + int64_t(s.to);
      s.from < s.to ? std::rotate(from, from + 1, to + 1) : std::rotate(to, from, from + 1);
      break;
    }
    case Change::Count:
      for (auto& access : s.gives ? row->at(s.from).gives : row->at(s.from).takes)
        if (access.channel == s.channel) {
          access.count = s.value;
          break;
        }
      break;
    case Change::None:
      break;
  }
  return program;
}

Suggestion find_suggestion(const Program& program, const Knot& knot, const ProveOptions& options) {
  constexpr size_t kWork = 400'000, kFewest = 16;  // operations to look at, and tries
  const Program& part = *with_parts(program).at(size_t(knot.part + 1));
  auto candidates = Candidates(part, knot).list();
  size_t tries = std::clamp(kWork / (program.num_operations() + 1), kFewest, kMostTries);
  for (auto& candidate : candidates) {
    if (tries-- == 0) break;
    candidate.part = knot.part;
    if (find_knot(apply(program, candidate), {options.without, false})) continue;
    candidate.text = text_of(part, candidate);
    return candidate;
  }
  return {.part = knot.part, .text = advice(knot.rule)};
}

std::string Knot::text(const Program& program) const {
  const Program& it = *with_parts(program).at(size_t(part + 1));
  std::string text =
      cat("program '", program.name, "'", part < 0 ? "" : cat(", part '", it.name, "'"), ", rule ",
          rule_name(rule), ": ", what, "\n");
  const auto name = [&](const Step& step) -> const std::string& {
    return it.rows[size_t(step.queue)][step.index].name;
  };
  size_t queue_width = 0, name_width = 0;
  for (const auto& step : circle) {
    queue_width = std::max(queue_width, it.queues[size_t(step.queue)].size());
    name_width = std::max(name_width, name(step).size());
  }
  const auto padded = [](std::string word, size_t width) {
    return word + std::string(width - word.size() + 2, ' ');
  };
  for (const auto& step : circle)
    text += cat("  ", padded(it.queues[size_t(step.queue)], queue_width),
                padded(name(step), name_width), step.why, "\n");
  if (!circle.empty())
    text +=
        cat("  ", padded(it.queues[size_t(circle[0].queue)], queue_width), name(circle[0]), "\n");
  if (!suggestion.text.empty()) text += cat("suggestion: ", suggestion.text, "\n");
  return text;
}

}  // namespace yoke::plan
