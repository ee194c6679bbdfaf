// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/simulate.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <set>

#include "yoke/base/error.h"

namespace yoke::plan {
namespace {

// When the results of the stages' actions were there; not a number: not yet.
class Board {
 public:
  explicit Board(const Schedule& schedule)
      : micro_(size_t(schedule.num_micro)),
        stages_(schedule.num_stages()),
        forward_(micro_ * size_t(stages_), std::nan("")),
        input_(forward_) {}

  double& forward(int stage, int micro) { return forward_[at(stage, micro)]; }
  double& input(int stage, int micro) { return input_[at(stage, micro)]; }
  int num_stages() const { return stages_; }

 private:
  size_t at(int stage, int micro) const { return size_t(stage) * micro_ + size_t(micro); }
  size_t micro_;
  int stages_;
  std::vector<double> forward_, input_;
};

}  // namespace

double Costs::duration(const Schedule& schedule, const Action& action, int rank) const {
  const double whole = action.act == Act::F || action.act == Act::Recompute ? times.f
                       : action.act == Act::I                               ? times.i
                       : action.act == Act::W                               ? times.w
                       : action.act == Act::B                               ? times.i + times.w
                                                                            : 0;
  if (whole == 0) return 0;
  const double weight = stage_weight.empty() ? 1 : stage_weight.at(size_t(action.stage));
  const double slowness = rank_slowness.empty() ? 1 : rank_slowness.at(size_t(rank));
  return whole * weight * slowness / schedule.chunks();
}

void Costs::check(int ranks, int stages) const {
  auto one_each = [](const char* what, const std::vector<double>& values, int want) {
    if (!values.empty() && int(values.size()) != want)
      fail(Kind::Usage, "there are ", want, " ", what, "s, and numbers for ", values.size());
    for (const double value : values)
      if (!(value > 0) || !std::isfinite(value))
        fail(Kind::Usage, "a ", what, " takes a time above 0 relative to 1, got ", value);
  };
  one_each("stage", stage_weight, stages);
  one_each("rank", rank_slowness, ranks);
  if (!(times.f >= 0 && times.i >= 0 && times.w >= 0 && times.comm >= 0) ||
      !(times.f + times.i + times.w > 0) || !(kept_after_i >= 0 && kept_after_i <= 1))
    fail(Kind::Usage, "times are 0 or more and not all 0, and what is kept is a part; got F ",
         times.f, ", I ", times.i, ", W ", times.w, ", a message ", times.comm, ", kept ",
         kept_after_i);
}

std::optional<Simulation> simulate(const Schedule& schedule, const Costs& costs,
                                   std::pair<int, size_t>* stuck) {
  const int ranks = schedule.num_ranks();
  costs.check(ranks, schedule.num_stages());
  Board board(schedule);
  // When what the action needs is there; not a number: not yet known.
  auto ready = [&](const Action& action, int rank) {
    auto from = [&](int stage, double time) {
      return schedule.rank_of[size_t(stage)] == rank ? time : time + costs.times.comm;
    };
    const auto [stage, act, micro] = action;
    switch (act) {
      case Act::F:
      case Act::RecvF:
        return stage == 0 ? 0 : from(stage - 1, board.forward(stage - 1, micro));
      case Act::I:
      case Act::B:
      case Act::RecvB: {
        const double own = board.forward(stage, micro);
        if (stage == board.num_stages() - 1) return own;
        const double given = from(stage + 1, board.input(stage + 1, micro));
        return std::isnan(own) ? own : std::isnan(given) ? given : std::max(own, given);
      }
      case Act::SendF:
      case Act::Recompute:
        return board.forward(stage, micro);
      case Act::W:
      case Act::SendB:
        return board.input(stage, micro);
      default:
        return 0.0;
    }
  };
  Simulation result;
  result.rows.resize(size_t(ranks));
  std::vector<size_t> next(size_t(ranks), 0);
  std::vector<double> now(size_t(ranks), 0), computed(size_t(ranks), 0);
  std::deque<int> awake;
  for (int rank = 0; rank < ranks; ++rank) awake.push_back(rank);
  std::vector<bool> queued(size_t(ranks), true);
  auto wake = [&](int stage) {
    if (stage < 0 || stage >= board.num_stages()) return;
    const int rank = schedule.rank_of[size_t(stage)];
    if (!queued[size_t(rank)]) awake.push_back(rank);
    queued[size_t(rank)] = true;
  };
  while (!awake.empty()) {
    const int rank = awake.front();
    const auto r = size_t(rank);
    awake.pop_front();
    queued[r] = false;
    for (; next[r] < schedule.rows[r].size(); ++next[r]) {
      const Action& action = schedule.rows[r][next[r]];
      // A message that is under way does not keep the rank from computing.
      const bool passes = action.act == Act::RecvF || action.act == Act::RecvB;
      const double there = passes ? 0 : ready(action, rank);
      if (std::isnan(there)) break;
      const double begin = std::max(now[r], there), length = costs.duration(schedule, action, rank);
      now[r] = begin + length;
      if (action.takes_time()) computed[r] += length;
      result.rows[r].push_back({action, begin, now[r]});
      if (action.act == Act::F) board.forward(action.stage, action.micro) = now[r];
      if (action.is_backward()) board.input(action.stage, action.micro) = now[r];
      if (action.act == Act::F) wake(action.stage + 1);
      if (action.is_backward()) wake(action.stage - 1);
    }
  }
  for (size_t r = 0; r < size_t(ranks); ++r)
    if (next[r] < schedule.rows[r].size()) {
      if (stuck) *stuck = {int(r), next[r]};
      return std::nullopt;
    }

  double longest_span = 0, work = 0;
  for (size_t r = 0; r < size_t(ranks); ++r) {
    double held = 0, peak = 0, first = std::numeric_limits<double>::infinity(), last = 0;
    const double each = 1.0 / schedule.chunks();
    std::set<std::pair<int, int>> again;  // stages and micro-batches that are computed again
    for (const auto& [action, begin, end] : result.rows[r])
      if (action.act == Act::Recompute) again.emplace(action.stage, action.micro);
    for (const auto& [action, begin, end] : result.rows[r]) {
      if (!action.takes_time()) continue;
      first = std::min(first, begin);
      last = end;
      const bool kept = !again.contains({action.stage, action.micro});
      if (action.act == Act::F && kept) held += each;
      if (action.act == Act::Recompute) held += each;
      peak = std::max(peak, held);
      if (action.act == Act::I) held -= each * (1 - costs.kept_after_i);
      if (action.act == Act::W) held -= each * costs.kept_after_i;
      if (action.act == Act::B) held -= each;
    }
    result.peak.push_back(peak);
    result.makespan = std::max(result.makespan, last);
    longest_span = std::max(longest_span, last - std::min(first, last));
    work = std::max(work, computed[r]);
  }
  for (size_t r = 0; r < size_t(ranks); ++r)
    result.busy.push_back(result.makespan > 0 ? computed[r] / result.makespan : 0);
  result.bubble = result.makespan > 0 ? 1 - work / result.makespan : 0;
  result.bubble_span = longest_span > 0 ? 1 - work / longest_span : 0;
  return result;
}

}  // namespace yoke::plan
