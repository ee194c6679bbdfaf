// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/passes.h"

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/plan/check.h"

namespace yoke::plan {

Schedule add_messages(const Schedule& schedule) {
  Schedule result = schedule;
  for (auto& row : result.rows) row.clear();
  const int stages = schedule.num_stages();
  std::vector<std::vector<bool>> forward(size_t(stages),
                                         std::vector<bool>(size_t(schedule.num_micro), false)),
      input = forward;
  auto done = [](const auto& board, int stage, int micro) {
    return bool(board[size_t(stage)][size_t(micro)]);
  };
  auto can_run = [&](const Action& action) {
    const auto [stage, act, micro] = action;
    if (act == Act::F) return stage == 0 || done(forward, stage - 1, micro);
    if (action.is_backward())
      return done(forward, stage, micro) && (stage == stages - 1 || done(input, stage + 1, micro));
    if (act == Act::W) return done(input, stage, micro);
    if (act == Act::Recompute) return done(forward, stage, micro);
    return true;
  };
  auto tell = [&](int rank, const Action& send, const Action& receive) {
    const int other = schedule.rank_of[size_t(receive.stage)];
    if (other == rank) return;
    result.rows[size_t(rank)].push_back(send);
    result.rows[size_t(other)].push_back(receive);
  };
  std::vector<size_t> next(schedule.rows.size(), 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      const auto r = size_t(rank);
      if (next[r] == schedule.rows[r].size() || !can_run(schedule.rows[r][next[r]])) continue;
      const Action action = schedule.rows[r][next[r]++];
      const auto [stage, act, micro] = action;
      progress = true;
      if (action.is_message()) continue;  // they are put in anew
      result.rows[r].push_back(action);
      if (act == Act::F) forward[size_t(stage)][size_t(micro)] = true;
      if (action.is_backward()) input[size_t(stage)][size_t(micro)] = true;
      if (act == Act::F && stage + 1 < stages)
        tell(rank, {stage, Act::SendF, micro}, {stage + 1, Act::RecvF, micro});
      if (action.is_backward() && stage > 0)
        tell(rank, {stage, Act::SendB, micro}, {stage - 1, Act::RecvB, micro});
    }
  }
  for (size_t r = 0; r < next.size(); ++r)
    if (next[r] < schedule.rows[r].size())
      fail(Kind::Usage, picture_of(schedule, {int(r), next[r], "waits for ever"}));
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
