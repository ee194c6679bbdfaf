// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/plan/check.h"
#include "yoke/plan/generate.h"
#include "yoke/plan/passes.h"

namespace yoke::plan {
namespace {

// The numbers that the schedule's rule allows, the smallest first.
std::vector<int> allowed_micro(const std::string& name, int p) {
  const int least = name == "zb-h2" ? 2 * p - 1 : name == "dualpipev" ? 2 * p : 1;
  if (name == "interleaved") return {p, 2 * p, 5 * p};
  return {least, least + 1, 2 * p + 3, 4 * p};
}

TEST(Schedule, ActionsAreReadAsTheyAreWritten) {
  for (const auto* text :
       {"2F0", "0I13", "7W1", "3B2", "3SEND_F1", "3RECV_F1", "12SEND_B0", "1RECV_B4", "0UNSHARD",
        "0RESHARD", "5REDUCE_GRAD", "1RECOMPUTE2", "OPT_STEP"}) {
    const auto action = parse_action(text);
    ASSERT_TRUE(action) << text;
    EXPECT_EQ(to_text(*action), text);
  }
  for (const auto* text : {"", "F", "2", "2F", "F0", "2G0", "-1F0", "2F0x", "0UNSHARD1",
                           "1OPT_STEP", "2F-1", "99999999999F0"})
    EXPECT_FALSE(parse_action(text)) << text;
}

TEST(Schedule, FilesAreReadAsTheyAreWritten) {
  for (const auto& name : schedule_names()) {
    const auto schedule =
        add_reductions(add_messages(make_schedule(name, {.ranks = 3, .micro_batches = 6})));
    EXPECT_EQ(parse_csv(to_csv(schedule)), schedule) << name;
    EXPECT_EQ(to_csv(parse_csv(to_csv(schedule))), to_csv(schedule)) << name;
  }
  EXPECT_EQ(parse_csv("# schedule mine\n0F0, ,0B0\n").rows[0].size(), 2u);
  for (const auto* text : {"", "0F0,zzz", "0F0\n0F1", "1F0", "0F2147483647", "99999F0", "-0F0"})
    EXPECT_THROW(parse_csv(text), Error) << text;
}

TEST(Schedule, EveryOneIsRightForAnyNumbers) {
  for (const auto& name : schedule_names())
    for (int p = 1; p <= 64; p += p < 9 ? 1 : p < 16 ? 7 : 16)
      for (const int m : allowed_micro(name, p)) {
        if (name == "zb-auto" && p > 16) continue;  // takes long; below it is tried for itself
        const auto schedule = make_schedule(name, {.ranks = p, .micro_batches = m});
        EXPECT_EQ(schedule.num_ranks(), p);
        const auto flaw = find_flaw(schedule);
        EXPECT_FALSE(flaw) << name << " p " << p << " m " << m << "\n"
                           << picture_of(schedule, *flaw);
        if (flaw) return;
        const auto lowered = add_reductions(add_messages(schedule));
        const auto later = find_flaw(lowered);
        EXPECT_FALSE(later) << name << " p " << p << " m " << m << "\n"
                            << picture_of(lowered, *later);
        const auto before = simulate(schedule), after = simulate(lowered);
        EXPECT_DOUBLE_EQ(before->makespan, after->makespan) << "messages take no time of a rank";
      }
}

TEST(Schedule, RulesAreToldInNumbers) {
  auto failure = [](const std::string& name, int p, int m, int chunks = 2) -> std::string {
    try {
      make_schedule(name, {.ranks = p, .micro_batches = m, .chunks = chunks});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(failure("interleaved", 4, 6).find("a multiple of 4, got 6"), std::string::npos);
  EXPECT_NE(failure("zb-h2", 4, 6).find("2 x 4 - 1 = 7"), std::string::npos);
  EXPECT_NE(failure("dualpipev", 4, 7).find("2 x 4 = 8"), std::string::npos);
  EXPECT_NE(failure("zbw", 4, 8).find("did you mean zbv"), std::string::npos);
  EXPECT_NE(failure("gpipe", 65, 8).find("1 to 64 ranks, got 65"), std::string::npos);
  EXPECT_NE(failure("gpipe", 4, 0).find("micro-batches, got 0"), std::string::npos);
  EXPECT_EQ(failure("gpipe", 4, 1), "");
}

// Bubbles of the papers, with F = I = W = 1 and free messages.
TEST(Schedule, UnitBubblesAreThoseOfTheFormulas) {
  for (int p = 1; p <= 16; ++p)
    for (const int m : {2 * p, 3 * p, 4 * p + 4}) {
      auto times = [&](const std::string& name) {
        return *simulate(make_schedule(name, {.ranks = p, .micro_batches = m}));
      };
      const double work = 3 * m;
      EXPECT_NEAR(times("gpipe").makespan, work + 3 * (p - 1), 1e-9);
      EXPECT_NEAR(times("1f1b").makespan, work + 3 * (p - 1), 1e-9);
      EXPECT_NEAR(times("layer").makespan, work * p, 1e-9);
      EXPECT_NEAR(times("zb-h1").makespan, work + (p - 1), 1e-9);
      EXPECT_NEAR(times("zb-h2").bubble_span, 0, 1e-9);
      EXPECT_NEAR(times("zbv").bubble_span, 0, 1e-9) << p << " " << m;
      if (m % p == 0 && p > 1) {
        EXPECT_NEAR(times("interleaved").makespan, work + 3.0 * (p - 1) / 2, 1e-9);
      }
      const auto one = times("1f1b");
      for (int r = 0; r < p; ++r) EXPECT_NEAR(one.peak[size_t(r)], std::min(m, p - r), 1e-9);
      EXPECT_NEAR(times("zb-h1").peak[0], p, 1e-9);
      EXPECT_NEAR(times("zb-h2").peak[0], 2 * p - 1, 1e-9);
      EXPECT_NEAR(std::ranges::max(times("zbv").peak), p, 1e-9);
      EXPECT_NEAR(times("gpipe").peak[0], m, 1e-9);
      EXPECT_NEAR(std::ranges::max(times("dualpipev").peak), p + 0.5, 0.5);
    }
  auto peak = [](int v) {
    return simulate(make_schedule("interleaved", {.ranks = 4, .micro_batches = 16, .chunks = v}))
        ->peak[0];
  };
  EXPECT_NEAR(peak(2), 5.5, 1e-9);
  EXPECT_NEAR(peak(4), 4.75, 1e-9);
}

// With equal times, p = 4 and m = 8: 27.3, 15.8, 11.1, 5.9 %.
TEST(Schedule, BubblesOfFourRanksAreThoseThatAreKnown) {
  auto bubble = [](const std::string& name) {
    return simulate(make_schedule(name, {.ranks = 4, .micro_batches = 8}))->bubble;
  };
  EXPECT_NEAR(bubble("1f1b"), 0.273, 5e-4);
  EXPECT_NEAR(bubble("interleaved"), 0.158, 5e-4);
  EXPECT_NEAR(bubble("zb-h1"), 0.111, 5e-4);
  EXPECT_NEAR(bubble("zb-h2"), 0.111, 5e-4);
  EXPECT_NEAR(bubble("zbv"), 0.059, 5e-4);
  EXPECT_NEAR(bubble("dualpipev"), 0.059, 5e-4);
}

// Qi et al., ICLR 2024: the measured times of Table 9 give the bubbles of Table 5.
TEST(Schedule, BubblesAreThoseOfTheZeroBubblePaper) {
  struct Row {
    int p, m;
    Times times;
    double one_f_one_b, h1, h2;
  };
  const Row rows[] = {
      {8, 24, {18.522, 18.086, 9.337, 0.601}, 0.2431, 0.1585, 0.1083},
      {8, 32, {18.513, 18.086, 9.331, 0.626}, 0.1985, 0.1242, 0.0837},
      {8, 64, {18.546, 18.097, 9.321, 0.762}, 0.1240, 0.0674, 0.0444},
      {8, 24, {29.718, 29.444, 19.927, 0.527}, 0.2347, 0.1323, 0.0698},
      {8, 32, {29.802, 29.428, 19.530, 0.577}, 0.1898, 0.1045, 0.0559},
      {8, 64, {29.935, 29.621, 19.388, 0.535}, 0.1091, 0.0554, 0.0294},
      {16, 48, {11.347, 11.248, 8.132, 0.377}, 0.2552, 0.1397, 0.0672},
      {16, 64, {11.307, 11.254, 8.101, 0.379}, 0.2082, 0.1088, 0.0516},
      {16, 128, {11.325, 11.308, 8.109, 0.378}, 0.1251, 0.0576, 0.0266},
      {32, 96, {10.419, 10.207, 7.715, 0.408}, 0.2646, 0.1421, 0.0641},
      {32, 128, {10.408, 10.204, 7.703, 0.408}, 0.2168, 0.1106, 0.0490},
      {32, 256, {10.402, 10.248, 7.698, 0.460}, 0.1352, 0.0594, 0.0257},
  };
  for (const auto& row : rows) {
    auto bubble = [&](const std::string& name) {
      const auto schedule = make_schedule(name, {.ranks = row.p, .micro_batches = row.m});
      return simulate(schedule, {.times = row.times})->bubble_span;
    };
    EXPECT_NEAR(bubble("1f1b"), row.one_f_one_b, 5.1e-5) << row.p << " " << row.m;
    EXPECT_NEAR(bubble("zb-h1"), row.h1, 5.1e-5) << row.p << " " << row.m;
    EXPECT_NEAR(bubble("zb-h2"), row.h2, 5.1e-5) << row.p << " " << row.m;
  }
}

TEST(Schedule, MessagesAndSlownessTakeTime) {
  const auto schedule = make_schedule("1f1b", {.ranks = 2, .micro_batches = 1});
  EXPECT_DOUBLE_EQ(simulate(schedule)->makespan, 6);
  EXPECT_DOUBLE_EQ(simulate(schedule, {.times = {.comm = 0.5}})->makespan, 7);
  EXPECT_DOUBLE_EQ(simulate(schedule, {.rank_slowness = {1, 2}})->makespan, 9);
  EXPECT_DOUBLE_EQ(simulate(schedule, {.stage_weight = {3, 1}})->makespan, 12);
  EXPECT_THROW(simulate(schedule, {.stage_weight = {3}}), Error);
  EXPECT_THROW(simulate(schedule, {.rank_slowness = {0, 0}}), Error);
}

TEST(Schedule, TheAutomaticOneUsesItsMemory) {
  const Costs costs{.times = {.f = 18.5, .i = 18.1, .w = 9.3, .comm = 0.6}};
  const int p = 8, m = 24;
  auto bubble = [&](double memory) {
    const auto schedule =
        make_schedule("zb-auto", {.ranks = p, .micro_batches = m, .limits = {costs, memory}});
    check(schedule, {.costs = costs, .memory = memory});
    return simulate(schedule, costs)->bubble_span;
  };
  const auto h1 = simulate(make_schedule("zb-h1", {.ranks = p, .micro_batches = m}), costs);
  EXPECT_LE(bubble(p), h1->bubble_span + 1e-9);
  EXPECT_LT(bubble(2 * p), bubble(p));
  EXPECT_LE(bubble(4), 0.6);
  EXPECT_THROW(bubble(0.5), Error);
}

// ZB-1p and ZB-2p of the same paper, where half and more of what a micro-batch holds is free after
// its I (32 h of 34 h + 5 a s bytes stay, of 1.5 B and 6.2 B parameters).
TEST(Schedule, TheAutomaticOneIsAsGoodAsThePapers) {
  struct Row {
    int p, m;
    Times times;
    double kept, one, two;
  };
  const Row rows[] = {{8, 24, {18.522, 18.086, 9.337, 0.601}, 0.366, 0.1585, 0.0433},
                      {8, 32, {18.513, 18.086, 9.331, 0.626}, 0.366, 0.1242, 0.0039},
                      {8, 64, {18.546, 18.097, 9.321, 0.762}, 0.366, 0.0674, 0.0026},
                      {8, 24, {29.718, 29.444, 19.927, 0.527}, 0.432, 0.1323, 0.0029}};
  for (const auto& [p, m, times, kept, one, two] : rows) {
    const Costs costs{.times = times, .kept_after_i = kept};
    auto bubble = [&, p = p, m = m](double memory) {
      const auto schedule =
          make_schedule("zb-auto", {.ranks = p, .micro_batches = m, .limits = {costs, memory}});
      check(schedule, {.costs = costs, .memory = memory});
      return simulate(schedule, costs)->bubble_span;
    };
    EXPECT_LE(bubble(p), one + 0.003) << m;
    EXPECT_LE(bubble(2 * p), two + 0.003) << m;
  }
}

TEST(Schedule, PassesAddWhatLiesBetween) {
  const auto zbv = make_schedule("zbv", {.ranks = 2, .micro_batches = 3});
  const auto merged = merge_backward(zbv);
  EXPECT_FALSE(find_flaw(merged));
  EXPECT_LT(merged.num_actions(), zbv.num_actions());
  const auto reduced = add_reductions(zbv);
  for (const auto& row : reduced.rows) {
    EXPECT_EQ(std::ranges::count(row, Act::ReduceGrad, &Action::act), 2);
    EXPECT_EQ(row.back().act, Act::OptStep);
  }
  EXPECT_EQ(add_reductions(reduced), reduced);
  const auto sharded =
      add_unshards(make_schedule("interleaved", {.ranks = 2, .micro_batches = 4, .chunks = 4}));
  for (const auto& row : sharded.rows) {
    std::vector<int> there;
    for (const auto& [stage, act, micro] : row) {
      if (act == Act::Unshard) there.push_back(stage);
      if (act == Act::Reshard) std::erase(there, stage);
      EXPECT_LE(there.size(), 2u);
      EXPECT_TRUE(act > Act::B || std::ranges::find(there, stage) != there.end());
    }
    EXPECT_TRUE(there.empty());
  }
}

// Single changes to a right schedule are refused, or leave a schedule that runs to its end.
TEST(Schedule, SingleChangesAreRefusedOrHarmless) {
  const Rng rng(3, "changes");
  uint64_t drawn = 0;
  std::map<std::string, int> outcomes;
  for (const auto& name : schedule_names())
    for (int trial = 0; trial < 60; ++trial) {
      const int p = 2 + int(rng.below(drawn++, 4)), m = 2 * p * (1 + int(rng.below(drawn++, 2)));
      Schedule schedule =
          add_reductions(add_messages(make_schedule(name, {.ranks = p, .micro_batches = m})));
      ASSERT_FALSE(find_flaw(schedule));
      auto& row = schedule.rows[rng.below(drawn++, uint64_t(p))];
      const size_t i = rng.below(drawn++, row.size() - 1);
      const size_t j = rng.below(drawn++, row.size() - 1);
      const int change = trial % 3;
      if (change == 0) std::swap(row[i], row[i + 1]);
      if (change == 1) row.erase(row.begin() + long(i));
      if (change == 2) {
        const Action moved = row[i];
        row.erase(row.begin() + long(i));
        row.insert(row.begin() + long(j), moved);
      }
      const auto flaw = find_flaw(schedule);
      ++outcomes[cat(change, flaw ? " refused" : " harmless")];
      EXPECT_TRUE(flaw || simulate(schedule)) << to_csv(schedule);
      EXPECT_TRUE(!flaw || picture_of(schedule, *flaw).find("-->") != std::string::npos);
    }
  EXPECT_GT(outcomes["1 refused"], 150);  // only the reductions may be missing
  EXPECT_GT(outcomes["0 refused"], 50);
  EXPECT_GT(outcomes["2 refused"], 100);
}

TEST(Schedule, WrongOnesAreShownWhereTheyAreWrong) {
  auto told = [](const std::string& csv) {
    try {
      check(parse_csv(csv));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(told("0F0,0B0\n1F0,1B0\n"), "");
  EXPECT_NE(told("0B0,0F0\n1F0,1B0\n").find("rank 0:  -->0B0"), std::string::npos);
  EXPECT_NE(told("0F0,0B0\n1F0,1I0\n").find("1W0 is missing"), std::string::npos);
  EXPECT_NE(told("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n").find("in a circle"), std::string::npos);
  EXPECT_NE(told("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n")
                .find("comes before its input is received"),
            std::string::npos);
  // Swapped on one end: equal shapes would be taken for each other.
  EXPECT_NE(told("0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n"
                 "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n")
                .find("as it is received"),
            std::string::npos);
  for (const auto& [csv, words] : std::vector<std::pair<std::string, std::string>>{
           {"0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", "1REDUCE_GRAD is missing"},
           {"0F0,OPT_STEP,0B0\n1F0,1B0,OPT_STEP\n", "comes after the optimizer's step"},
           {"0F0,0B0,OPT_STEP\n1F0,1B0\n", "OPT_STEP is missing"},
           {"0UNSHARD,0RESHARD,0F0,0B0\n", "computes without its parameters"},
           {"0UNSHARD,0UNSHARD,0F0,0B0\n", "gathers what is there"},
           {"0RECOMPUTE0,0F0,0B0\n", "comes before its forward"},
           {"0F0,0B0,0RECOMPUTE0\n", "comes after its backward"},
           {"0F0,1F0,1B0,0B0\n2F0,2B0\n", "rank 1 has 1 stages and rank 0 has 2"},
           {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", "is alone"}})
    EXPECT_NE(told(csv).find(words), std::string::npos) << csv << told(csv);
  EXPECT_EQ(told("0F0,0RECOMPUTE0,0B0\n\n\n"), "");
  EXPECT_EQ(simulate(parse_csv("0F0,0RECOMPUTE0,0B0"))->bubble, 0);
  EXPECT_NE(told("0F0,0SEND_F0,0RECV_B0,0REDUCE_GRAD,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
                .find("adds to gradients that have been reduced"),
            std::string::npos);
}

TEST(Schedule, LargeOnesAreMadeAndSimulatedQuickly) {
  const auto begin = std::chrono::steady_clock::now();
  const auto schedule = make_schedule("zbv", {.ranks = 64, .micro_batches = 512});
  ASSERT_FALSE(find_flaw(schedule));
  const auto made = std::chrono::steady_clock::now();
  EXPECT_TRUE(simulate(schedule));
  const auto simulated = std::chrono::steady_clock::now();
  // The aims are 1 s and 0.5 s; a sanitizer takes longer.
  EXPECT_LT(std::chrono::duration<double>(made - begin).count(), 20);
  EXPECT_LT(std::chrono::duration<double>(simulated - made).count(), 10);
}

}  // namespace
}  // namespace yoke::plan
