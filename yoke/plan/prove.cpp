// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/prove.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/plan/marked_graph.h"
#include "yoke/plan/unify.h"

namespace yoke::plan {
namespace {

// One program without its parts. One rule after the other, first wins.
class Prover {
 public:
  Prover(const Program& program, const ProveOptions& options)
      : program_(program), options_(options) {
    YOKE_CHECK(program_.rows.size() == program_.queues.size(), "a row for each queue");
    for (size_t q = 0; q < program_.rows.size(); ++q)
      for (size_t i = 0; i < program_.rows[q].size(); ++i) at_.push_back({int(q), i});
  }

  std::optional<Knot> run() {
    places();
    ends();
    if (on(Rule::Balance))
      if (auto knot = balance()) return knot;
    if (on(Rule::Order)) {
      if (auto knot = ends_of_channels()) return knot;
      if (auto knot = members()) return knot;
    }
    if (auto knot = meetings()) return knot;
    const MarkedGraph graph = make_graph();
    if (const auto circle = graph.circle(); !circle.empty()) return knot_of(circle);
    return on(Rule::Races) ? races(graph) : std::nullopt;
  }

 private:
  using Edge = MarkedGraph::Edge;
  struct End {
    int operation;
    int64_t sum;  // of a round's values, those of this operation included
  };
  struct Meeting {
    Rule rule;
    std::vector<int> operations;
  };
  struct Check {  // `before` must be done when `after` begins, in the same round or the next
    int before, after, buffer;
    bool later;
  };

  bool on(Rule rule) const {
    return std::ranges::find(options_.without, rule) == std::end(options_.without);
  }
  const Operation& operation(int i) const {
    const auto [queue, index] = at_[size_t(i)];
    return program_.rows[size_t(queue)][index];
  }
  int queue(int i) const { return at_[size_t(i)].queue; }
  int take(int i) const { return 2 * i; }
  int give(int i) const { return 2 * i + 1; }
  int num_operations() const { return int(at_.size()); }
  std::string name(int i) const {
    return cat(operation(i).name, " on ", program_.queues[size_t(queue(i))]);
  }
  std::string channel(int c) const { return cat("'", program_.channels[size_t(c)].name, "'"); }
  Knot knot(Rule rule, std::string what, const std::vector<int>& operations,
            int channel = -1) const {
    Knot result{.rule = rule, .what = std::move(what), .channel = channel};
    for (const int i : operations) result.places.push_back(at_[size_t(i)]);
    return result;
  }

  void places() const {
    const auto inside = [](int place, size_t size) { return place >= 0 && size_t(place) < size; };
    const auto& p = program_;
    for (const auto& group : p.groups)
      for (const int q : group.queues) YOKE_CHECK(inside(q, p.rows.size()), "a group's queue");
    for (int i = 0; i < num_operations(); ++i) {
      const Operation& o = operation(i);
      for (const auto* list : {&o.takes, &o.gives})
        for (const auto& a : *list)
          YOKE_CHECK(inside(a.channel, p.channels.size()), "a channel of ", name(i));
      for (const auto& use : o.uses)
        YOKE_CHECK(inside(use.buffer, p.buffers.size()), "a buffer of ", name(i));
      for (const int part : o.parts)
        YOKE_CHECK(
            inside(part, p.parts.size()) && p.parts[size_t(part)].rows.size() == p.rows.size(),
            "a part of ", name(i));
      if (!o.meets()) continue;
      if (is_message(o))
        YOKE_CHECK(inside(o.peer, p.rows.size()), "the peer of ", name(i));
      else
        YOKE_CHECK(inside(o.group, p.groups.size()), "the group of ", name(i));
    }
  }
  static bool is_message(const Operation& o) {
    return o.kind == Operation::Kind::Send || o.kind == Operation::Kind::Recv;
  }

  void ends() {
    givers_.resize(program_.channels.size());
    takers_.resize(program_.channels.size());
    for (int i = 0; i < num_operations(); ++i)
      for (const bool gives : {false, true})
        for (const auto& a : gives ? operation(i).gives : operation(i).takes) {
          auto& list = (gives ? givers_ : takers_)[size_t(a.channel)];
          list.push_back({i, sum(list) + a.count});
        }
  }
  static int64_t sum(const std::vector<End>& ends) { return ends.empty() ? 0 : ends.back().sum; }

  std::optional<Knot> balance() const {
    for (size_t c = 0; c < program_.channels.size(); ++c) {
      const Channel& it = program_.channels[c];
      if (!it.waits) continue;
      const auto wrong = [&](const std::vector<int>& at, const auto&... parts) {
        return knot(Rule::Balance, cat(parts...), at, int(c));
      };
      const auto called = [&] { return channel(int(c)); };
      if (it.capacity < 1) return wrong({}, called(), " has a capacity of ", it.capacity);
      if (it.initial < 0 || it.initial > it.capacity)
        return wrong({}, called(), " begins with ", it.initial, " values and has a capacity of ",
                     it.capacity);
      for (const auto* list : {&givers_[c], &takers_[c]}) {
        const bool gives = list == &givers_[c];
        int64_t before = 0;
        for (const auto& [i, sum] : *list) {
          const int64_t count = sum - std::exchange(before, sum);
          if (count < 1 || count > it.capacity)
            return wrong({i}, name(i), gives ? " gives " : " takes ", count, " values of ",
                         called(), " at once: with its capacity that can be 1 to ", it.capacity);
        }
      }
      const int64_t given = sum(givers_[c]), taken = sum(takers_[c]);
      if (given == taken) continue;
      return wrong({}, "in a round ", given, given == 1 ? " value is" : " values are", " given to ",
                   called(), by(givers_[c]), " and ", taken, taken == 1 ? " is" : " are", " taken",
                   by(takers_[c]));
    }
    return std::nullopt;
  }
  std::string by(const std::vector<End>& ends) const {
    if (ends.empty()) return "";
    return cat(" (by ", name(ends[0].operation), ends.size() > 1 ? " and others)" : ")");
  }

  std::optional<Knot> ends_of_channels() const {
    for (size_t c = 0; c < program_.channels.size(); ++c)
      for (const auto* list : {&givers_[c], &takers_[c]})
        for (const auto& [i, unused] : *list)
          if (const int first = list->front().operation;
              program_.channels[c].waits && queue(i) != queue(first))
            return knot(Rule::Order,
                        cat(name(first), " and ", name(i), " both ",
                            list == &givers_[c] ? "give to " : "take from ", channel(int(c)),
                            ": a channel has one queue at each end, or nothing orders them"),
                        {first, i}, int(c));
    return std::nullopt;
  }

  std::optional<Knot> members() const {
    for (int i = 0; i < num_operations(); ++i) {
      const Operation& o = operation(i);
      if (!o.meets()) continue;
      if (is_message(o)) {
        if (o.peer != queue(i)) continue;
        return knot(Rule::Order, cat(name(i), " is a message from a queue to itself"), {i});
      }
      const auto& [group, queues] = program_.groups[size_t(o.group)];
      const auto is_member = [&](int q) { return std::ranges::find(queues, q) != queues.end(); };
      if (!is_member(queue(i)))
        return knot(Rule::Order,
                    cat(name(i), " meets group '", group, "', which its queue is not in"), {i});
      for (const int part : o.parts)
        for (size_t q = 0; q < program_.rows.size(); ++q)
          if (const Program& it = program_.parts[size_t(part)];
              !it.rows[q].empty() && !is_member(int(q)))
            return knot(Rule::Order,
                        cat(it.rows[q][0].name, " on ", program_.queues[q], " is in '", it.name,
                            "', which only group '", group, "' does, by ", name(i)),
                        {i});
    }
    return std::nullopt;
  }

  // Who meets whom; what they mean is compared on the way.
  std::optional<Knot> meetings() {
    using Ends = std::vector<std::vector<int>>;    // operations, by member
    std::map<std::pair<int, int>, Ends> messages;  // by sender and receiver
    std::vector<std::map<int, std::vector<int>>> groups(program_.groups.size());  // by queue
    for (size_t g = 0; g < groups.size(); ++g)
      for (const int q : program_.groups[g].queues) groups[g][q];
    for (int i = 0; i < num_operations(); ++i) {
      const Operation& o = operation(i);
      if (!o.meets()) continue;
      if (is_message(o)) {
        const bool sends = o.kind == Operation::Kind::Send;
        auto& ends = messages[sends ? std::pair(queue(i), o.peer) : std::pair(o.peer, queue(i))];
        ends.resize(2);
        ends[sends ? 0 : 1].push_back(i);
      } else if (auto& members = groups[size_t(o.group)]; members.contains(queue(i))) {
        members[queue(i)].push_back(i);
      }
    }
    for (const auto& [way, ends] : messages)
      if (auto knot = meet(Rule::Messages, ends, [&, way = way] {
            return cat("from ", program_.queues[size_t(way.first)], " to ",
                       program_.queues[size_t(way.second)]);
          }))
        return knot;
    for (size_t g = 0; g < groups.size(); ++g) {
      Ends ends;
      for (auto& [unused, operations] : groups[g]) ends.push_back(std::move(operations));
      if (auto knot = meet(Rule::Collectives, ends,
                           [&] { return cat("of group '", program_.groups[g].name, "'"); }))
        return knot;
    }
    return std::nullopt;
  }

  // The k-th of each end meets the k-th of the others.
  template <typename Where>
  std::optional<Knot> meet(Rule rule, const std::vector<std::vector<int>>& ends, Where where) {
    const auto longest = std::ranges::max_element(ends, {}, &std::vector<int>::size);
    for (size_t k = 0; longest != ends.end() && k < longest->size(); ++k) {
      const int first = (*longest)[k];
      const auto called = [&] {
        return cat(rule == Rule::Messages ? "message " : "meeting ", k, " ", where());
      };
      Meeting meeting{rule, {}};
      for (const auto& end : ends) {
        if (k < end.size()) meeting.operations.push_back(end[k]);
        if (!on(Rule::Order)) continue;
        if (k >= end.size())
          return knot(Rule::Order,
                      cat(name(first), " is ", called(), " and has no other end: there are ",
                          longest->size(), " and ", end.size(), " in a round"),
                      {first});
        const Operation &a = operation(first), &b = operation(end[k]);
        const bool same = rule == Rule::Messages || (a.kind == b.kind && a.parts == b.parts);
        if (a.what != b.what || !same)
          return knot(Rule::Order,
                      cat(called(), " is '", a.what, "' for ", name(first), " and '", b.what,
                          "' for ", name(end[k]), same ? "" : ", of another kind or other parts"),
                      {first, end[k]});
      }
      if (on(rule)) meetings_.push_back(std::move(meeting));
    }
    return std::nullopt;
  }

  // Of each operation its taking and giving, then the meetings.
  MarkedGraph make_graph() const {
    std::vector<Edge> edges;
    std::vector<char> meets(at_.size(), false);
    int vertex = 2 * num_operations();
    for (const auto& meeting : meetings_) {
      for (const int i : meeting.operations) {
        meets[size_t(i)] = true;
        edges.push_back({take(i), vertex, meeting.rule, -1, false});
        edges.push_back({vertex, give(i), meeting.rule, -1, false});
      }
      ++vertex;
    }
    for (int i = 0, first = 0; i < num_operations(); ++i) {
      if (queue(i) != queue(first)) first = i;
      const bool last = i + 1 == num_operations() || queue(i + 1) != queue(i);
      if (!meets[size_t(i)]) edges.push_back({take(i), give(i), Rule::Data, -1, false});
      edges.push_back({give(i), take(last ? first : i + 1), Rule::Data, -1, last});
    }
    for (size_t c = 0; c < program_.channels.size(); ++c) {
      const Channel& it = program_.channels[c];
      if (!it.waits) continue;
      // Who takes or gives several waits for the last of them: the others came before.
      for (const auto& [i, sum] : takers_[c])
        if (const auto [from, later] = find(givers_[c], sum - 1 - it.initial);
            from >= 0 && on(Rule::Data))
          edges.push_back({give(from), take(i), Rule::Data, int(c), later});
      for (const auto& [i, sum] : givers_[c])
        if (const auto [from, later] = find(takers_[c], sum - 1 + it.initial - it.capacity);
            from >= 0 && on(Rule::Capacity))
          edges.push_back({take(from), give(i), Rule::Capacity, int(c), later});
    }
    return {size_t(vertex), edges};
  }
  // Whose the n-th value of a round is; before the first: of the last round, or nobody's (-1).
  static std::pair<int, bool> find(const std::vector<End>& ends, int64_t n) {
    const bool later = n < 0;
    if (later) n += sum(ends);
    if (n < 0 || n >= sum(ends)) return {-1, later};
    return {std::ranges::upper_bound(ends, n, {}, &End::sum)->operation, later};
  }

  Knot knot_of(std::vector<const Edge*> path) const {
    const int hubs = 2 * num_operations();  // vertices from here are meetings
    if (path[0]->to >= hubs) std::ranges::rotate(path, path.begin() + 1);
    std::vector<std::pair<int, const Edge*>> steps;  // who waits, and why
    for (size_t k = 0; k < path.size(); ++k) {
      const int waiter = path[k]->to / 2;
      if (path[k]->from >= hubs) ++k;
      if (path[k]->from / 2 != waiter || path[k]->channel >= 0) steps.push_back({waiter, path[k]});
    }
    const auto in_row = [](const auto& step) {
      return step.second->rule == Rule::Data && step.second->channel < 0;
    };
    auto start = steps.end();  // the first operation that waits for more than its row
    for (auto s = steps.begin(); s != steps.end(); ++s)
      if (!in_row(*s) && (start == steps.end() || s->first < start->first)) start = s;
    std::ranges::rotate(steps, start);
    Knot result;
    constexpr std::array kWeight{0, 1, 4, 3, 2};  // by rule: which one names the circle
    for (size_t k = 0; k < steps.size(); ++k) {
      if (k > 0 && in_row(steps[k]) && in_row(steps[k - 1])) continue;  // one step over a row
      const auto& [i, edge] = steps[k];
      result.circle.push_back(
          {queue(i), at_[size_t(i)].index, why(i, *edge), edge->rule, edge->channel});
      if (kWeight[size_t(edge->rule)] > kWeight[size_t(result.rule)]) result.rule = edge->rule;
    }
    const size_t num = result.circle.size();
    result.what = cat(
        name(steps[0].first),
        num == 1 ? " waits for itself"
                 : cat(" and ", num - 1, num == 2 ? " other" : " others", " wait for each other"),
        ", in every round: nobody can begin");
    return result;
  }
  std::string why(int i, const Edge& edge) const {
    const Operation& o = operation(i);
    if (edge.rule == Rule::Capacity)
      return cat("waits for room in ", channel(edge.channel), ", made by");
    if (edge.channel >= 0) return cat("waits for a value of ", channel(edge.channel), " from");
    if (edge.rule == Rule::Collectives) return cat("waits in '", o.what, "' for");
    if (edge.rule != Rule::Messages) return "comes after";
    return o.kind == Operation::Kind::Send ? cat("waits to send '", o.what, "' to")
                                           : cat("waits to receive '", o.what, "' from");
  }

  std::optional<Knot> races(const MarkedGraph& graph) const {
    std::vector<std::vector<Check>> checks(program_.rows.size());  // by queue of `before`
    for (const auto& check : ordered_uses(graph))
      checks[size_t(queue(check.before))].push_back(check);
    const size_t num = 2 * at_.size() + meetings_.size();
    for (size_t q = 0; q < checks.size(); ++q) {
      if (checks[q].empty()) continue;
      // The last operation of this queue that is done before a moment, of this round or the next.
      std::vector<int64_t> marks(num, -1);
      for (int i = 0; i < num_operations(); ++i)
        if (queue(i) == int(q)) marks[size_t(give(i))] = int64_t(at_[size_t(i)].index);
      const auto done = graph.greatest(marks, int64_t(program_.rows[q].size()));
      for (const auto& [before, after, buffer, later] : checks[q])
        if (done[size_t(take(after)) + (later ? num : 0)] < int64_t(at_[size_t(before)].index))
          return knot(Rule::Races,
                      cat(name(before), " and ", name(after), " both touch '",
                          program_.buffers[size_t(buffer)], "', ",
                          writes(before, buffer) && writes(after, buffer) ? "both" : "one",
                          " to write, and nothing ",
                          later ? "keeps the second, in its next round, from beginning before the "
                                  "first is done"
                                : "says which comes first"),
                      {before, after});
    }
    return std::nullopt;
  }
  bool writes(int i, int buffer) const {
    return std::ranges::find(operation(i).uses, Use{buffer, true}) != operation(i).uses.end();
  }

  // In the order in which they can happen, each use of a buffer against those up to the next write,
  // around into the next round: the others are ordered if these are.
  std::vector<Check> ordered_uses(const MarkedGraph& graph) const {
    std::vector<std::vector<int>> users(program_.buffers.size());
    for (const int v : graph.order())
      if (v < 2 * num_operations() && v % 2 == 0)
        for (const auto& use : operation(v / 2).uses)
          if (auto& list = users[size_t(use.buffer)]; list.empty() || list.back() != v / 2)
            list.push_back(v / 2);
    std::vector<Check> checks;
    for (size_t b = 0; b < users.size(); ++b) {
      const auto& list = users[b];
      const size_t num = list.size();
      std::vector<size_t> written(2 * num + 1, 2 * num);  // the next write from here
      for (size_t k = 2 * num; k-- > 0;)
        written[k] = writes(list[k % num], int(b)) ? k : written[k + 1];
      if (num == 0 || written[0] == 2 * num) continue;
      for (size_t k = 0; k < num; ++k) {
        const size_t end = written[k + 1];
        for (size_t other = written[k] == k ? k + 1 : end; other <= end; ++other)
          if (queue(list[k]) != queue(list[other % num]))
            checks.push_back({list[k], list[other % num], int(b), other >= num});
      }
    }
    return checks;
  }

  const Program& program_;
  const ProveOptions& options_;
  std::vector<Knot::Place> at_;  // operations, row after row
  std::vector<std::vector<End>> givers_, takers_;
  std::vector<Meeting> meetings_;
};

}  // namespace

const char* rule_name(Rule rule) {
  constexpr std::array kNames{"balance",     "data",  "capacity", "messages",
                              "collectives", "order", "races",    "shapes"};
  static_assert(kNames.size() == kNumRules);
  return kNames[size_t(rule)];
}

std::optional<Knot> find_knot(const Program& program, const ProveOptions& options) {
  const auto programs = with_parts(program);
  std::optional<Knot> knot;
  for (size_t p = 0; !knot && p < programs.size(); ++p)
    if ((knot = Prover(*programs[p], options).run())) knot->part = int(p) - 1;
  if (!knot && std::ranges::find(options.without, Rule::Shapes) == options.without.end())
    knot = find_clash(programs);
  if (knot && options.suggest) knot->suggestion = find_suggestion(program, *knot, options);
  return knot;
}

bool hangs_on_timing(const Program& program) {
  std::vector<int> ends(program.channels.size(), 0);
  for (const auto& row : program.rows)
    for (const auto& operation : row) {
      for (const auto& access : operation.takes) ends[size_t(access.channel)] |= 1;
      for (const auto& access : operation.gives) ends[size_t(access.channel)] |= 2;
    }
  for (size_t c = 0; c < ends.size(); ++c)
    if (!program.channels[c].waits && ends[c] == 3) return true;
  return std::ranges::any_of(program.parts, hangs_on_timing);
}

}  // namespace yoke::plan
