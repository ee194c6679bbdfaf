// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/check.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/plan/passes.h"

namespace yoke::plan {
namespace {

// One after the other, first wins.
class Checker {
 public:
  Checker(const Schedule& schedule, const Limits& limits) : schedule_(schedule), limits_(limits) {}

  std::optional<Flaw> run() {
    for (const auto check :
         {&Checker::places, &Checker::completeness, &Checker::reductions, &Checker::shards,
          &Checker::progress, &Checker::memory, &Checker::pairs, &Checker::rendezvous})
      if (auto flaw = (this->*check)()) return flaw;
    return std::nullopt;
  }

 private:
  template <typename Fn>
  std::optional<Flaw> each(Fn fn) const {  // fn(rank, index, action) gives what is wrong
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& row = schedule_.rows[size_t(rank)];
      for (size_t i = 0; i < row.size(); ++i)
        if (std::string what = fn(rank, i, row[i]); !what.empty()) return Flaw{rank, i, what};
    }
    return std::nullopt;
  }

  std::optional<Flaw> places() const {
    const int ranks = schedule_.num_ranks();
    if (ranks == 0 || schedule_.rank_of.empty() || schedule_.num_micro < 1)
      return Flaw{0, 0, "has no ranks, no stages or no micro-batches"};
    std::vector<int> num_stages(size_t(ranks), 0);
    for (const int rank : schedule_.rank_of) {
      if (rank < 0 || rank >= ranks) return Flaw{0, 0, cat("has a stage on rank ", rank)};
      ++num_stages[size_t(rank)];
    }
    for (int rank = 0; rank < ranks; ++rank)
      if (num_stages[size_t(rank)] != num_stages[0])
        return of_row(rank, cat("rank ", rank, " has ", num_stages[size_t(rank)],
                                " stages and rank 0 has ", num_stages[0]));
    return each([&](int rank, size_t, const Action& action) -> std::string {
      if (!action.well_formed()) return "wants a stage and a micro-batch, or has one too many";
      if (action.stage < 0) return "";
      if (action.stage >= schedule_.num_stages())
        return cat("is of a stage that there is not, of ", schedule_.num_stages());
      if (action.micro >= schedule_.num_micro)
        return cat("is of a micro-batch that there is not, of ", schedule_.num_micro);
      const int owner = schedule_.rank_of[size_t(action.stage)];
      return owner == rank ? "" : cat("belongs to rank ", owner, ", which has the stage");
    });
  }

  std::optional<Flaw> completeness() const {
    enum : uint8_t { Forward = 1, Input = 2, Weights = 4, Again = 8 };
    std::vector<uint8_t> seen(schedule_.rank_of.size() * size_t(schedule_.num_micro), 0);
    auto flaw = each([&](int, size_t, const Action& action) -> std::string {
      if (!action.takes_time()) return "";
      uint8_t& had =
          seen[size_t(action.stage) * size_t(schedule_.num_micro) + size_t(action.micro)];
      const uint8_t gives = action.act == Act::F   ? Forward
                            : action.act == Act::I ? Input
                            : action.act == Act::W ? Weights
                            : action.act == Act::B ? Input | Weights
                                                   : Again;
      if ((had & gives) != 0) return "is done a second time";
      if (action.act != Act::F && (had & Forward) == 0) return "comes before its forward";
      if (action.act == Act::W && (had & Input) == 0) return "comes before its I";
      if (action.act == Act::Recompute && (had & Input) != 0) return "comes after its backward";
      had |= gives;
      return "";
    });
    for (int stage = 0; !flaw && stage < schedule_.num_stages(); ++stage)
      for (int micro = 0; !flaw && micro < schedule_.num_micro; ++micro) {
        const uint8_t had = seen[size_t(stage) * size_t(schedule_.num_micro) + size_t(micro)];
        if ((had | Again) == (Forward | Input | Weights | Again)) continue;
        const Act act = (had & Forward) == 0 ? Act::F : (had & Input) == 0 ? Act::I : Act::W;
        const int rank = schedule_.rank_of[size_t(stage)];
        flaw = of_row(rank, cat(to_text({stage, act, micro}), " is missing"));
      }
    return flaw;
  }

  template <typename Fn>
  bool any(Fn fn) const {  // fn(action)
    return std::ranges::any_of(schedule_.rows,
                               [&](const auto& row) { return std::ranges::any_of(row, fn); });
  }
  bool has(Act act) const {
    return any([&](const Action& action) { return action.act == act; });
  }
  bool has_messages() const {
    return any([](const Action& action) { return action.is_message(); });
  }
  Flaw of_row(int rank, std::string what) const {
    return {rank, schedule_.rows[size_t(rank)].size(), std::move(what)};
  }

  // All stages are reduced or none; the optimizer's step comes last, on all ranks or on none.
  std::optional<Flaw> reductions() const {
    std::vector<char> reduced(schedule_.rank_of.size(), false);
    std::vector<bool> stepped(schedule_.rows.size(), false);
    if (auto flaw = each([&](int rank, size_t, const Action& action) -> std::string {
          const auto r = size_t(rank);
          const bool adds = action.act == Act::W || action.act == Act::B;
          if (stepped[r] && (adds || action.act == Act::ReduceGrad || action.act == Act::OptStep))
            return "comes after the optimizer's step";
          if (action.act == Act::OptStep) stepped[r] = true;
          if (action.stage < 0) return "";
          const auto stage = size_t(action.stage);
          if (adds && reduced[stage]) return "adds to gradients that have been reduced";
          if (action.act != Act::ReduceGrad) return "";
          return std::exchange(reduced[stage], true) ? "is done a second time" : "";
        }))
      return flaw;
    for (int stage = 0; has(Act::ReduceGrad) && stage < schedule_.num_stages(); ++stage)
      if (const int rank = schedule_.rank_of[size_t(stage)]; !reduced[size_t(stage)])
        return of_row(rank, cat(to_text({stage, Act::ReduceGrad, -1}), " is missing"));
    for (size_t r = 0; has(Act::OptStep) && r < stepped.size(); ++r)
      if (!stepped[r]) return of_row(int(r), "OPT_STEP is missing");
    return std::nullopt;
  }

  // Where parameters are gathered and dropped at all, what computes has them.
  std::optional<Flaw> shards() const {
    if (!has(Act::Unshard) && !has(Act::Reshard)) return std::nullopt;
    std::vector<char> gathered(schedule_.rank_of.size(), false);
    return each([&](int, size_t, const Action& action) -> std::string {
      if (action.stage < 0) return "";
      const auto stage = size_t(action.stage);
      if (action.takes_time() && !gathered[stage]) return "computes without its parameters";
      if (action.act == Act::Unshard && std::exchange(gathered[stage], true))
        return "gathers what is there";
      if (action.act == Act::Reshard && !std::exchange(gathered[stage], false))
        return "drops what is not there";
      return "";
    });
  }

  std::optional<Flaw> progress() const {
    std::pair<int, size_t> stuck;
    simulation_ = simulate(schedule_, limits_.costs, &stuck);
    if (simulation_) return std::nullopt;
    return Flaw{stuck.first, stuck.second,
                "waits for ever: computations wait for each other in a circle", true};
  }

  std::optional<Flaw> memory() const {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const double peak = simulation_->peak[size_t(rank)];
      if (peak > limits_.memory + 1e-9)
        return of_row(rank, cat("the rank holds ", peak, " micro-batches, and has room for ",
                                limits_.memory));
    }
    return std::nullopt;
  }

  static bool sends(const Action& action) {
    return action.act == Act::SendF || action.act == Act::SendB;
  }
  // The action of the other rank that this message meets.
  static Action answer(const Action& action) {
    switch (action.act) {
      case Act::SendF:
        return {action.stage + 1, Act::RecvF, action.micro};
      case Act::RecvF:
        return {action.stage - 1, Act::SendF, action.micro};
      case Act::SendB:
        return {action.stage - 1, Act::RecvB, action.micro};
      default:
        return {action.stage + 1, Act::SendB, action.micro};
    }
  }

  std::optional<Flaw> pairs() const {
    if (!has_messages()) return std::nullopt;  // those of add_messages() are in order
    const int stages = schedule_.num_stages();
    struct Place {
      Action as_sent;
      int rank;
      size_t index;
    };
    std::map<std::pair<int, int>, std::vector<Place>> sent, received;  // by sender and receiver
    if (auto flaw = each([&](int rank, size_t i, const Action& action) -> std::string {
          if (!action.is_message()) return "";
          const Action other = answer(action);
          if (other.stage < 0 || other.stage >= stages) return "has no stage at its other end";
          const int peer = schedule_.rank_of[size_t(other.stage)];
          if (peer == rank) return "goes from a rank to itself";
          if (sends(action))
            sent[{rank, peer}].push_back({action, rank, i});
          else
            received[{peer, rank}].push_back({other, rank, i});
          return "";
        }))
      return flaw;
    if (auto flaw = uses()) return flaw;
    for (const auto* list : {&sent, &received})
      for (const auto& [way, unused] : *list) {
        const auto &s = sent[way], &r = received[way];
        for (size_t i = 0; i < std::max(s.size(), r.size()); ++i) {
          if (i >= r.size() || i >= s.size()) {
            const Place& alone = i < s.size() ? s[i] : r[i];
            return Flaw{alone.rank, alone.index,
                        cat("is alone: it has no other end on rank ",
                            i < s.size() ? way.second : way.first)};
          }
          if (s[i].as_sent != r[i].as_sent)
            return Flaw{
                r[i].rank, r[i].index,
                cat("is message ", i, " from rank ", way.first, " as it is received, which is ",
                    to_text(s[i].as_sent), " as it is sent")};
        }
      }
    return std::nullopt;
  }

  // Each message once, sent after what it carries was computed, received before it is used.
  std::optional<Flaw> uses() const {
    int current = -1;
    std::map<Action, int> seen;
    return each([&](int rank, size_t, const Action& action) -> std::string {
      if (rank != current) seen.clear(), current = rank;
      const auto [stage, act, micro] = action;
      if (action.is_message() && seen[action]++ > 0) return "is done a second time";
      if (action.computes()) ++seen[action];
      const bool gave_input =
          seen.contains({stage, Act::I, micro}) || seen.contains({stage, Act::B, micro});
      if (act == Act::SendF && !seen.contains({stage, Act::F, micro}))
        return "comes before what it sends";
      if (act == Act::SendB && !gave_input) return "comes before what it sends";
      auto comes_from = [&](int other) {
        return other >= 0 && other < schedule_.num_stages() &&
               schedule_.rank_of[size_t(other)] != rank;
      };
      if (act == Act::F && comes_from(stage - 1) && !seen.contains({stage, Act::RecvF, micro}))
        return "comes before its input is received";
      if (action.is_backward() && comes_from(stage + 1) &&
          !seen.contains({stage, Act::RecvB, micro}))
        return "comes before its gradient is received";
      return "";
    });
  }

  std::optional<Flaw> rendezvous() const {
    const Schedule lowered = has_messages() ? schedule_ : add_messages(schedule_);
    std::vector<size_t> next(lowered.rows.size(), 0);
    auto at_end = [&](size_t r) { return next[r] == lowered.rows[r].size(); };
    for (bool moves = true; moves;) {
      moves = false;
      for (size_t r = 0; r < next.size(); ++r) {
        while (!at_end(r) && !lowered.rows[r][next[r]].is_message()) ++next[r], moves = true;
        if (at_end(r)) continue;
        const Action other = answer(lowered.rows[r][next[r]]);
        const auto peer = size_t(lowered.rank_of[size_t(other.stage)]);
        if (at_end(peer) || lowered.rows[peer][next[peer]] != other) continue;
        ++next[r], ++next[peer];
        moves = true;
      }
    }
    for (size_t r = 0; r < next.size(); ++r)
      if (!at_end(r))
        return Flaw{int(r), next[r],
                    "waits for ever, if messages wait for their other end on one queue", true};
    return std::nullopt;
  }

  const Schedule& schedule_;
  const Limits& limits_;
  mutable std::optional<Simulation> simulation_;  // of progress(), for memory()
};

}  // namespace

std::optional<Flaw> find_flaw(const Schedule& schedule, const Limits& limits) {
  return Checker(schedule, limits).run();
}

std::string picture_of(const Schedule& schedule, const Flaw& flaw) {
  constexpr size_t kBefore = 6, kAfter = 4;
  const auto rank = size_t(flaw.rank);
  const size_t length = rank < schedule.rows.size() ? schedule.rows[rank].size() : 0;
  std::string text =
      cat("schedule ", schedule.name, ", rank ", flaw.rank, ", action ", flaw.index, " of ", length,
          flaw.index < length ? cat(": ", to_text(schedule.rows[rank][flaw.index]), " ") : ": ",
          flaw.what, "\n");
  const size_t begin = flaw.index > kBefore ? flaw.index - kBefore : 0;
  for (size_t r = 0; r < schedule.rows.size(); ++r) {
    const auto& row = schedule.rows[r];
    text += cat(r == rank ? "-> " : "   ", "rank ", r, ":", begin > 0 ? " …" : "");
    for (size_t i = begin; i < row.size() && i <= flaw.index + kAfter; ++i)
      text += cat(r == rank && i == flaw.index ? "  -->" : " ", to_text(row[i]));
    if (r == rank && flaw.index >= row.size()) text += "  -->";
    text += flaw.index + kAfter + 1 < row.size() ? " …\n" : "\n";
  }
  return text;
}

void check(const Schedule& schedule, const Limits& limits) {
  if (const auto flaw = find_flaw(schedule, limits)) fail(Kind::Usage, picture_of(schedule, *flaw));
}

}  // namespace yoke::plan
