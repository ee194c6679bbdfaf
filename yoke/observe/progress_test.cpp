// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "yoke/base/text.h"

using namespace yoke;
using namespace yoke::observe;
using namespace std::chrono_literals;

TEST(Progress, TerminalGetsABarWithRateAndEta) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock,
                    {.label = "train", .total = 1000, .is_terminal = true, .columns = 100});
  clock.advance(40s);
  progress.update(450, "loss 2.31");
  EXPECT_EQ(
      out.str(),
      "\rtrain [=========>          ]  45 %  450/1000 steps  11.2 steps/s  ETA 49 s  loss 2.31"
      "\x1b[K");
}

TEST(Progress, OfAShortJobShowsNothing) {
  std::ostringstream out;
  ManualClock clock;
  Progress progress(out, clock, {.label = "x", .total = 4, .patience = std::chrono::seconds(1)});
  progress.update(2);
  EXPECT_EQ(out.str(), "");
  clock.advance(std::chrono::seconds(2));
  progress.update(3);
  EXPECT_NE(out.str(), "");
}

TEST(Progress, TerminalIsRedrawnAtMostTenTimesASecond) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock, {.label = "x", .total = 10000, .is_terminal = true});
  for (uint64_t i = 0; i < 1000; ++i) {
    progress.update(i);
    clock.advance(1ms);
  }
  const auto text = out.str();
  EXPECT_EQ(std::ranges::count(text, '\r'), 10);
  EXPECT_EQ(std::ranges::count(text, '\n'), 0);
}

TEST(Progress, LastUpdateIsAlwaysDrawnAndEndsTheLine) {
  ManualClock clock;
  std::ostringstream out;
  {
    Progress progress(out, clock, {.label = "x", .total = 4, .is_terminal = true});
    clock.advance(2s);
    progress.update(3);
    progress.update(4);
    progress.update(4);
  }
  EXPECT_TRUE(out.str().ends_with(
      "\rx [====================] 100 %  4/4 steps  2.00 steps/s  in 2 s\x1b[K\n"))
      << out.str();
  EXPECT_EQ(std::ranges::count(out.str(), '\n'), 1);
}

TEST(Progress, JobThatEndsEarlyLeavesTheCursorOnAFreshLine) {
  ManualClock clock;
  std::ostringstream out;
  { Progress progress(out, clock, {.label = "x", .total = 4, .is_terminal = true}); }
  EXPECT_EQ(out.str(), "");
  {
    Progress progress(out, clock, {.label = "x", .total = 4, .is_terminal = true});
    progress.update(1);
  }
  EXPECT_TRUE(out.str().ends_with("\x1b[K\n"));
}

TEST(Progress, LongLineIsCutBetweenCharacters) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock, {.label = "ééé", .total = 4, .is_terminal = true, .columns = 4});
  progress.update(1);
  EXPECT_EQ(out.str(), "\ré\x1b[K");
}

TEST(Progress, PipeGetsALinePerTenth) {
  ManualClock clock;
  std::ostringstream out;
  {
    Progress progress(out, clock, {.label = "train", .total = 1000});
    for (uint64_t i = 1; i <= 1000; ++i) {
      clock.advance(100ms);
      progress.update(i, "loss 2");
    }
  }
  const auto lines = split(out.str(), '\n');
  ASSERT_EQ(lines.size(), 11u);
  EXPECT_EQ(lines[0], "train: 10 %, 100/1000 steps, 10.0 steps/s, ETA 1 min 30 s, loss 2");
  EXPECT_EQ(lines[9], "train: 100 %, 1000/1000 steps, 10.0 steps/s, in 1 min 40 s, loss 2");
  EXPECT_EQ(lines[10], "");
}

TEST(Progress, JumpOverSeveralTenthsIsOneLine) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock, {.label = "x", .total = 100});
  progress.update(55);
  progress.update(59);
  progress.update(60);
  EXPECT_EQ(out.str(), "x: 55 %, 55/100 steps\nx: 60 %, 60/100 steps\n");
}

TEST(Progress, PipeGetsALinePerUpdateOfAShortJob) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock, {.label = "x", .total = 3, .unit = "files"});
  for (uint64_t i = 1; i <= 3; ++i) progress.update(i);
  EXPECT_EQ(out.str(), "x: 33 %, 1/3 files\nx: 66 %, 2/3 files\nx: 100 %, 3/3 files\n");
}

TEST(Progress, ResumedJobCountsOnlyItsOwnStepsForTheRate) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock, {.label = "x", .total = 1000, .initial = 500});
  progress.update(500);
  EXPECT_EQ(out.str(), "");
  clock.advance(10s);
  progress.update(600);
  EXPECT_EQ(out.str(), "x: 60 %, 600/1000 steps, 10.0 steps/s, ETA 40 s\n");
}

TEST(Progress, PercentIsExact) {
  for (uint64_t percent = 1; percent <= 100; ++percent) {
    const ManualClock clock;
    std::ostringstream out;
    Progress(out, clock, {.label = "x", .total = 100, .is_terminal = true}).update(percent);
    EXPECT_NE(out.str().find(" " + std::to_string(percent) + " %"), std::string::npos) << out.str();
  }
}

TEST(Progress, EmptyJobIsDoneAtOnce) {
  ManualClock clock;
  std::ostringstream out;
  Progress progress(out, clock, {.label = "x", .total = 0});
  progress.update(0);
  EXPECT_EQ(out.str(), "x: 100 %, 0/0 steps\n");
}
