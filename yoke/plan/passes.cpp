// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/passes.h"

#include <algorithm>
#include <tuple>

#include "yoke/base/error.h"
#include "yoke/plan/check.h"

namespace yoke::plan {

Schedule add_messages(const Schedule& schedule) {
  std::pair<int, size_t> stuck;
  const auto simulation = simulate(schedule, {}, &stuck);
  if (!simulation)
    fail(Kind::Usage, picture_of(schedule, {stuck.first, stuck.second, "waits for ever"}));
  // All ranks' actions in the one order in which they would end.
  std::vector<std::tuple<double, int, size_t>> order;  // end, rank, place in its row
  for (int rank = 0; rank < schedule.num_ranks(); ++rank)
    for (size_t i = 0; i < schedule.rows[size_t(rank)].size(); ++i)
      order.emplace_back(simulation->rows[size_t(rank)][i].end, rank, i);
  std::ranges::sort(order);
  Schedule result = schedule;
  for (auto& row : result.rows) row.clear();
  auto tell = [&](int rank, const Action& send, const Action& receive) {
    const int other = schedule.rank_of[size_t(receive.stage)];
    if (other == rank) return;
    result.rows[size_t(rank)].push_back(send);
    result.rows[size_t(other)].push_back(receive);
  };
  for (const auto& [end, rank, i] : order) {
    const Action action = schedule.rows[size_t(rank)][i];
    const auto [stage, act, micro] = action;
    if (action.is_message()) continue;  // they are put in anew
    result.rows[size_t(rank)].push_back(action);
    if (act == Act::F && stage + 1 < schedule.num_stages())
      tell(rank, {stage, Act::SendF, micro}, {stage + 1, Act::RecvF, micro});
    if (action.is_backward() && stage > 0)
      tell(rank, {stage, Act::SendB, micro}, {stage - 1, Act::RecvB, micro});
  }
  return result;
}

Schedule add_reductions(const Schedule& schedule) {
  Schedule result = schedule;
  for (auto& row : result.rows) {
    std::erase_if(row, [](const Action& action) {
      return action.act == Act::ReduceGrad || action.act == Act::OptStep;
    });
    std::vector<bool> seen(schedule.rank_of.size(), false);
    for (size_t i = row.size(); i-- > 0;) {  // from the end: the last comes first
      const auto [stage, act, micro] = row[i];
      if ((act != Act::W && act != Act::B) || seen[size_t(stage)]) continue;
      seen[size_t(stage)] = true;
      row.insert(row.begin() + long(i) + 1, Action{stage, Act::ReduceGrad, -1});
    }
    row.push_back({-1, Act::OptStep, -1});
  }
  return result;
}

Schedule add_unshards(const Schedule& schedule, int ahead) {
  Schedule result = schedule;
  for (auto& row : result.rows) {
    std::erase_if(row, [](const Action& action) {
      return action.act == Act::Unshard || action.act == Act::Reshard;
    });
    std::vector<Action> actions;
    std::vector<int> gathered;
    for (size_t i = 0; i < row.size(); ++i) {
      if (row[i].takes_time()) {
        std::vector<int> wanted;  // this stage's, and the next different ones'
        for (size_t j = i; j < row.size() && int(wanted.size()) <= std::max(0, ahead); ++j)
          if (row[j].takes_time() && std::ranges::find(wanted, row[j].stage) == wanted.end())
            wanted.push_back(row[j].stage);
        std::erase_if(gathered, [&](int stage) {
          const bool drop = std::ranges::find(wanted, stage) == wanted.end();
          if (drop) actions.push_back({stage, Act::Reshard, -1});
          return drop;
        });
        for (const int stage : wanted)
          if (std::ranges::find(gathered, stage) == gathered.end()) {
            actions.push_back({stage, Act::Unshard, -1});
            gathered.push_back(stage);
          }
      }
      actions.push_back(row[i]);
    }
    for (const int stage : gathered) actions.push_back({stage, Act::Reshard, -1});
    row = std::move(actions);
  }
  return result;
}

Schedule merge_backward(const Schedule& schedule) {
  Schedule result = schedule;
  for (auto& row : result.rows) {
    std::vector<Action> actions;
    for (const auto& action : row) {
      if (action.act == Act::W && !actions.empty() &&
          actions.back() == Action{action.stage, Act::I, action.micro})
        actions.back().act = Act::B;
      else
        actions.push_back(action);
    }
    row = std::move(actions);
  }
  return result;
}

}  // namespace yoke::plan
