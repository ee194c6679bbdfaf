// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/generate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <map>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

constexpr int kMaxRanks = 64, kMaxChunks = kMaxStages / kMaxRanks;

// One rank's row under construction, with the next micro-batch of each kind of work of each stage.
class Row {
 public:
  void add(Act act, int stage) { actions.push_back({stage, act, next_[{act, stage}]++}); }
  void add(Act act, int stage, int micro) { actions.push_back({stage, act, micro}); }
  int count(Act act, int stage) const {
    const auto found = next_.find({act, stage});
    return found == next_.end() ? 0 : found->second;
  }
  std::vector<Action> actions;

 private:
  std::map<std::pair<Act, int>, int> next_;
};

using MakeRow = std::function<std::vector<Action>(int rank)>;

// Stage s on rank s mod p.
std::vector<int> looped(int ranks, int chunks) {
  std::vector<int> rank_of;
  for (int stage = 0; stage < ranks * chunks; ++stage) rank_of.push_back(stage % ranks);
  return rank_of;
}

// There and back again: rank r has the stages r and 2p - 1 - r.
std::vector<int> folded(int ranks) {
  std::vector<int> rank_of;
  for (int stage = 0; stage < 2 * ranks; ++stage)
    rank_of.push_back(stage < ranks ? stage : 2 * ranks - 1 - stage);
  return rank_of;
}

Schedule assemble(const std::string& name, const ScheduleShape& shape, std::vector<int> rank_of,
                  const MakeRow& make_row) {
  Schedule schedule{.name = name, .num_micro = shape.micro_batches, .rank_of = std::move(rank_of)};
  for (int rank = 0; rank < shape.ranks; ++rank) schedule.rows.push_back(make_row(rank));
  return schedule;
}

Schedule layer(const std::string& name, const ScheduleShape& shape) {
  return assemble(name, shape, looped(shape.ranks, 1), [&](int r) {
    Row row;
    for (int i = 0; i < shape.micro_batches; ++i) row.add(Act::F, r), row.add(Act::B, r);
    return row.actions;
  });
}

Schedule gpipe(const std::string& name, const ScheduleShape& shape) {
  return assemble(name, shape, looped(shape.ranks, 1), [&](int r) {
    Row row;
    for (int i = 0; i < shape.micro_batches; ++i) row.add(Act::F, r);
    for (int i = 0; i < shape.micro_batches; ++i) row.add(Act::B, r);
    return row.actions;
  });
}

Schedule one_f_one_b(const std::string& name, const ScheduleShape& shape) {
  const int m = shape.micro_batches;
  return assemble(name, shape, looped(shape.ranks, 1), [&](int r) {
    Row row;
    const int warm = std::min(shape.ranks - 1 - r, m);
    for (int i = 0; i < warm; ++i) row.add(Act::F, r);
    for (int i = warm; i < m; ++i) row.add(Act::F, r), row.add(Act::B, r);
    for (int i = 0; i < warm; ++i) row.add(Act::B, r);
    return row.actions;
  });
}

// Narayanan et al., SC 2021: micro-batches in groups of p, each group through all chunks.
Schedule interleaved(const std::string& name, const ScheduleShape& shape) {
  const int p = shape.ranks, m = shape.micro_batches, v = shape.chunks;
  if (v == 1) return one_f_one_b(name, shape);
  if (m % p != 0)
    fail(Kind::Usage, "interleaved goes in groups of as many micro-batches as ranks: their number ",
         "must be a multiple of ", p, ", got ", m);
  return assemble(name, shape, looped(p, v), [&](int r) {
    Row row;
    auto work = [&](Act act, int k) {
      const int chunk = k % (p * v) / p;
      const int stage = (act == Act::F ? chunk : v - 1 - chunk) * p + r;
      row.add(act, stage, k / (p * v) * p + k % p);
    };
    const int all = m * v, warm = std::min(2 * (p - r - 1) + (v - 1) * p, all);
    for (int k = 0; k < warm; ++k) work(Act::F, k);
    for (int k = warm; k < all; ++k) work(Act::F, k), work(Act::B, k - warm);
    for (int k = all - warm; k < all; ++k) work(Act::B, k);
    return row.actions;
  });
}

Schedule looped_bfs(const std::string& name, const ScheduleShape& shape) {
  const int p = shape.ranks, m = shape.micro_batches, v = shape.chunks;
  return assemble(name, shape, looped(p, v), [&](int r) {
    Row row;
    for (int chunk = 0; chunk < v; ++chunk)
      for (int i = 0; i < m; ++i) row.add(Act::F, chunk * p + r, i);
    for (int chunk = v; chunk-- > 0;)
      for (int i = m; i-- > 0;) row.add(Act::B, chunk * p + r, i);
    return row.actions;
  });
}

// Qi et al., ICLR 2024. H1 keeps what 1F1B keeps, H2 twice as much: `reach` is 1 or 2. Every rank
// begins with so many forwards that its first I comes in time, and puts off W by what it waited.
Schedule zero_bubble(const std::string& name, const ScheduleShape& shape, int reach) {
  const int p = shape.ranks, m = shape.micro_batches;
  if (reach == 2 && m < 2 * p - 1)
    fail(Kind::Usage, "zb-h2 wants at least 2 x ", p, " - 1 = ", 2 * p - 1, " micro-batches for ",
         p, " ranks, got ", m);
  return assemble(name, shape, looped(p, 1), [&](int r) {
    Row row;
    for (int i = 0; i < std::min(reach * (p - 1 - r), m); ++i) row.add(Act::F, r);
    for (int i = 0; i < m; ++i) {
      if (row.count(Act::F, r) < m) row.add(Act::F, r);
      row.add(Act::I, r);
      if (i >= reach * r) row.add(Act::W, r);
    }
    while (row.count(Act::W, r) < m) row.add(Act::W, r);
    return row.actions;
  });
}

// Qi et al., NeurIPS 2024. Made for 2p - 1 micro-batches or more; with fewer, those that are too
// many are left out.
Schedule zbv(const std::string& name, const ScheduleShape& shape) {
  const int p = shape.ranks, m = std::max(shape.micro_batches, 2 * p - 1);
  return assemble(name, shape, folded(p), [&](int r) {
    Row row;
    const int down = r, up = 2 * p - 1 - r;
    auto backward = [&](int stage) { row.add(Act::I, stage), row.add(Act::W, stage); };
    for (int i = 0; i < 2 * (p - r) - 1; ++i) row.add(Act::F, down);
    for (int i = 0; i < r; ++i) row.add(Act::F, up), row.add(Act::F, down);
    for (int i = 0; i < p - r; ++i) row.add(Act::F, up), backward(up);
    while (row.count(Act::F, up) < row.count(Act::F, down) || row.count(Act::F, down) < m) {
      if (row.count(Act::F, down) < m) row.add(Act::F, down);
      backward(down);
      row.add(Act::F, up);
      backward(up);
    }
    for (int i = 0; i < r; ++i) row.add(Act::I, down), row.add(Act::I, up);
    for (int i = 0; i < p - r; ++i) backward(down);
    for (const int stage : {up, down})
      while (row.count(Act::W, stage) < row.count(Act::I, stage)) row.add(Act::W, stage);
    std::erase_if(row.actions, [&](const auto& a) { return a.micro >= shape.micro_batches; });
    return row.actions;
  });
}

// DeepSeek-AI, 2024, and its folded form. A forward and a backward that could overlap stand one
// after the other.
Schedule dualpipev(const std::string& name, const ScheduleShape& shape) {
  const int p = shape.ranks, m = shape.micro_batches;
  if (m < 2 * p)
    fail(Kind::Usage, "dualpipev wants at least 2 x ", p, " = ", 2 * p, " micro-batches for ", p,
         " ranks, got ", m);
  return assemble(name, shape, folded(p), [&](int r) {
    Row row;
    const int down = r, up = 2 * p - 1 - r;
    std::deque<Action> put_off;  // W
    std::map<int, int> backwards;
    auto forward = [&](int stage) { row.add(Act::F, stage); };
    auto backward = [&](int stage, bool split = false) {
      const int micro = backwards[stage]++;
      row.add(split ? Act::I : Act::B, stage, micro);
      if (split) put_off.push_back({stage, Act::W, micro});
    };
    auto weights = [&] {
      if (put_off.empty()) return;
      row.actions.push_back(put_off.front());
      put_off.pop_front();
    };
    const int after = p - r - 1;
    for (int i = 0; i < 2 * after; ++i) forward(down);
    for (int i = 0; i < r + 1; ++i) forward(down), forward(up);
    for (int i = 0; i < after; ++i) backward(up, true), weights(), forward(up);
    for (int i = 0; i < m - 2 * p + r + 1; ++i)
      forward(down), backward(up), forward(up), backward(down);
    for (int i = 0; i < after; ++i) backward(up), forward(up), backward(down);
    for (int i = 0; i < r + 1; ++i) {
      const bool second_half = i >= (r + 1) / 2;
      const bool odd_first = i == (r + 1) / 2 && r % 2 == 0;  // the half begins between the two
      backward(up, second_half && !odd_first);
      backward(down, second_half);
    }
    for (int i = 0; i < after; ++i) weights(), backward(down, true);
    while (!put_off.empty()) weights();
    return row.actions;
  });
}

// Lists made as the ranks would go, by times: a ready I first, else a ready F within memory, else a
// W where the gap is long enough for it or memory is full. Several such rules are tried, and the
// schedule that takes least is taken.
struct Rule {
  int warm_up;   // forwards before the first I, at most, on rank 0; evenly fewer on those after it
  double gap;    // of a W, that must be free for it to be put in
  bool f_first;  // where I and F are both ready
};

Schedule by_rule(const ScheduleShape& shape, const Rule& rule) {
  const int p = shape.ranks, m = shape.micro_batches;
  Schedule schedule{.name = "zb-auto", .num_micro = m, .rank_of = looped(p, 1)};
  schedule.rows.resize(size_t(p));
  const Costs& costs = shape.limits.costs;
  struct State {
    int f = 0, i = 0, w = 0;
    double now = 0, held = 0;
  };
  std::vector<State> states;
  states.resize(size_t(p));
  const double never = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> forward(size_t(p), std::vector<double>(size_t(m), never)),
      input = forward;
  const double slack = 1e-9;
  auto left = [&](int r) { return states[size_t(r)].w < m; };
  // What the rank would do next, and when; never: it waits for others.
  auto choose = [&](int r) -> std::pair<double, Act> {
    const State& s = states[size_t(r)];
    const double comm = costs.times.comm;
    double f_ready = never, i_ready = never;
    const bool room = s.held + 1 <= shape.limits.memory + slack;
    const int ahead = std::max(1, rule.warm_up - r * std::max(1, rule.warm_up / p));
    if (s.f < m && room && (s.i > 0 || s.f < ahead || s.f <= s.i))
      f_ready = r == 0 ? 0 : forward[size_t(r) - 1][size_t(s.f)] + comm;
    if (s.i < s.f)
      i_ready =
          r == p - 1 ? forward[size_t(r)][size_t(s.i)] : input[size_t(r) + 1][size_t(s.i)] + comm;
    f_ready = std::max(f_ready, s.now), i_ready = std::max(i_ready, s.now);
    const double soonest = std::min(f_ready, i_ready);
    const double w_time = costs.duration(schedule, {r, Act::W, s.w}, r);
    const bool can_w = s.w < s.i;
    if (can_w && (soonest - s.now >= rule.gap * w_time - slack && soonest > s.now + slack))
      return {s.now, Act::W};
    if (can_w && s.i == m && s.f == m) return {s.now, Act::W};
    if (can_w && s.f < m && !room && i_ready > s.now + slack) return {s.now, Act::W};
    if (soonest == never) return {never, Act::F};
    const bool both = std::abs(f_ready - i_ready) <= slack;
    if (both) return {soonest, rule.f_first ? Act::F : Act::I};
    return f_ready < i_ready ? std::pair(f_ready, Act::F) : std::pair(i_ready, Act::I);
  };
  while (true) {
    // The rank whose next action begins first goes: what it gives away can only come later.
    double first = never;
    int rank = -1;
    Act act = Act::F;
    for (int r = 0; r < p; ++r) {
      if (!left(r)) continue;
      const auto [time, what] = choose(r);
      if (time < first) first = time, rank = r, act = what;
    }
    if (rank < 0) break;
    State& s = states[size_t(rank)];
    int& micro = act == Act::F ? s.f : act == Act::I ? s.i : s.w;
    const Action action{rank, act, micro};
    s.now = first + costs.duration(schedule, action, rank);
    if (act == Act::F) forward[size_t(rank)][size_t(micro)] = s.now, s.held += 1;
    if (act == Act::I) input[size_t(rank)][size_t(micro)] = s.now, s.held -= 1 - costs.kept_after_i;
    if (act == Act::W) s.held -= costs.kept_after_i;
    ++micro;
    schedule.rows[size_t(rank)].push_back(action);
  }
  return schedule;
}

// What a schedule takes: both where steps are kept apart and where they may overlap. Never, if it
// holds too much or does not come to its end.
double cost_of(const Schedule& schedule, const ScheduleShape& shape) {
  const auto simulation = simulate(schedule, shape.limits.costs);
  if (!simulation || std::ranges::max(simulation->peak) > shape.limits.memory + 1e-9)
    return std::numeric_limits<double>::infinity();
  const double work = simulation->makespan * (1 - simulation->bubble);
  return simulation->makespan + work / (1 - simulation->bubble_span);
}

// Neighbours that change places where that makes it shorter, again and again.
void polish(Schedule& schedule, double& least, const ScheduleShape& shape) {
  constexpr size_t kEffort = 4'000'000;  // actions that are simulated; about half a second
  size_t effort = 0;
  for (bool better = true; better;) {
    better = false;
    for (auto& row : schedule.rows)
      for (size_t i = 0; i + 1 < row.size(); ++i) {
        const Action &a = row[i], &b = row[i + 1];
        if (a.act == b.act || (a.micro == b.micro)) continue;
        if ((effort += schedule.num_actions()) > kEffort) return;
        std::swap(row[i], row[i + 1]);
        const double cost = cost_of(schedule, shape);
        if (cost < least - 1e-9)
          least = cost, better = true;
        else
          std::swap(row[i], row[i + 1]);
      }
  }
}

Schedule zb_auto(const std::string& name, const ScheduleShape& shape) {
  const int p = shape.ranks;
  shape.limits.costs.check(p, p);
  if (!(shape.limits.memory >= 1))
    fail(Kind::Usage, "zb-auto wants memory for one micro-batch or more, got ",
         shape.limits.memory);
  Schedule best;
  double least = std::numeric_limits<double>::infinity();
  auto consider = [&](const Schedule& schedule) {
    if (schedule.num_actions() != size_t(3 * p * shape.micro_batches)) return;  // it got stuck
    const double cost = cost_of(schedule, shape);
    if (cost < least) best = schedule, least = cost;
  };
  const bool large = p * shape.micro_batches > 4096;  // fewer rules, for a second's work
  const std::vector<int> warm_ups =
      large ? std::vector{p, 2 * p} : std::vector{p, p + p / 2, 2 * p - 1, 2 * p, 3 * p};
  const std::vector<double> gaps =
      large ? std::vector{0.5, 1.0} : std::vector{0.25, 0.5, 0.75, 1.0};
  for (const int warm_up : warm_ups)
    for (const double gap : gaps)
      for (const bool f_first : {false, true}) {
        ScheduleShape bounded = shape;
        bounded.limits.memory = std::min(shape.limits.memory, double(warm_up));
        consider(by_rule(bounded, {int(bounded.limits.memory), gap, f_first}));
      }
  consider(zero_bubble(name, shape, 1));
  if (shape.micro_batches >= 2 * p - 1) consider(zero_bubble(name, shape, 2));
  if (std::isinf(least)) fail(Kind::Internal, "zb-auto found no schedule for ", p, " ranks");
  polish(best, least, shape);
  best.name = name;
  return best;
}

using Generator = std::function<Schedule(const std::string&, const ScheduleShape&)>;
const std::vector<std::pair<std::string, Generator>>& generators() {
  static const std::vector<std::pair<std::string, Generator>> all = {
      {"layer", layer},
      {"gpipe", gpipe},
      {"1f1b", one_f_one_b},
      {"interleaved", interleaved},
      {"looped-bfs", looped_bfs},
      {"zb-h1", [](const auto& name, const auto& shape) { return zero_bubble(name, shape, 1); }},
      {"zb-h2", [](const auto& name, const auto& shape) { return zero_bubble(name, shape, 2); }},
      {"zbv", zbv},
      {"dualpipev", dualpipev},
      {"zb-auto", zb_auto}};
  return all;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, generator] : generators()) result.push_back(name);
    return result;
  }();
  return names;
}

Schedule make_schedule(const std::string& name, const ScheduleShape& shape) {
  if (shape.ranks < 1 || shape.ranks > kMaxRanks)
    fail(Kind::Usage, "a schedule has 1 to ", kMaxRanks, " ranks, got ", shape.ranks);
  if (shape.micro_batches < 1 || shape.micro_batches > kMaxMicro)
    fail(Kind::Usage, "a schedule has 1 to ", kMaxMicro, " micro-batches, got ",
         shape.micro_batches);
  if (shape.chunks < 1 || shape.chunks > kMaxChunks)
    fail(Kind::Usage, "a rank has 1 to ", kMaxChunks, " chunks, got ", shape.chunks);
  const auto found =
      std::ranges::find(generators(), name, &std::pair<std::string, Generator>::first);
  if (found == generators().end()) {
    const auto meant = nearest(name, schedule_names());
    fail(Kind::Usage, "there is no schedule '", name, "'; ",
         meant.empty() ? "" : cat("did you mean ", join(meant, " or "), "? "), "There are ",
         join(schedule_names(), ", "));
  }
  return found->second(name, shape);
}

}  // namespace yoke::plan
