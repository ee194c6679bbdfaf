// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>

using namespace yoke::observe;
using namespace std::chrono_literals;

namespace {

// A log that writes into `lines`, at a moment that does not pass.
LogOptions into(std::vector<std::string>& lines) {
  return {.sink = [&lines](std::string_view line) { lines.emplace_back(line); },
          .now = [] { return std::chrono::system_clock::time_point(1772357400s + 250ms); }};
}

}  // namespace

TEST(Log, WritesTimeLevelRankMessageAndFields) {
  std::vector<std::string> lines;
  const Log log(into(lines));
  log.info("saved", {{"step", 500}, {"path", "runs/a"}, {"loss", 2.5}});
  log.error("lost");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0],
            "2026-03-01T09:30:00.250Z info    rank 0: saved  step=500 path=runs/a loss=2.5");
  EXPECT_EQ(lines[1], "2026-03-01T09:30:00.250Z error   rank 0: lost");
}

TEST(Log, QuotesFieldsThatCouldBeMisread) {
  std::vector<std::string> lines;
  const Log log(into(lines));
  log.info("x", {{"a", "two words"}, {"b", ""}, {"c", "k=v"}, {"d", "line\nbreak"}, {"e", "q\"q"}});
  EXPECT_TRUE(lines.at(0).ends_with(R"(x  a="two words" b="" c="k=v" d="line\nbreak" e="q\"q")"))
      << lines[0];
}

TEST(Log, WritesJsonLinesWhenAsked) {
  std::vector<std::string> lines;
  LogOptions options = into(lines);
  options.json = true;
  Log(options, 3).warning("slow \"link\"", {{"gbps", 1.5}, {"peers", std::vector{0, 1}}});
  EXPECT_EQ(lines.at(0), R"({"time":"2026-03-01T09:30:00.250Z","level":"warning","rank":3,)"
                         R"("message":"slow \"link\"","gbps":1.5,"peers":[0,1]})");
}

TEST(Log, PatternSignsInAMessageStayAsTheyAre) {
  std::vector<std::string> lines;
  const Log log(into(lines));
  log.info("100 %v {} %l");
  EXPECT_TRUE(lines.at(0).ends_with("rank 0: 100 %v {} %l")) << lines[0];
}

TEST(Log, OnlyRankZeroSpeaksBelowWarning) {
  std::vector<std::string> lines;
  const Log zero(into(lines));
  const Log two = zero.for_rank(2);
  zero.debug("a");
  zero.info("b");
  two.info("c");
  two.warning("d");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines[0].ends_with("info    rank 0: b"));
  EXPECT_TRUE(lines[1].ends_with("warning rank 2: d"));
}

TEST(Log, OtherRanksSpeakWhenAskedButNeverMoreThanRankZero) {
  std::vector<std::string> lines;
  LogOptions options = into(lines);
  options.other_ranks = Level::Debug;
  EXPECT_TRUE(Log(options, 1).speaks(Level::Info));
  EXPECT_FALSE(Log(options, 1).speaks(Level::Debug));
  options.level = Level::Error;
  options.other_ranks = Level::Warning;
  EXPECT_FALSE(Log(options, 1).speaks(Level::Warning));
  options.level = Level::Off;
  EXPECT_FALSE(Log(options, 0).speaks(Level::Error));
  EXPECT_FALSE(Log(options, 0).speaks(Level::Off));
}

TEST(Log, TimeIsUtcWhereverTheMachineStands) {
  const char* zone = std::getenv("TZ");
  const std::string before = zone ? zone : "";
  setenv("TZ", "FAR-9", 1);
  tzset();
  std::vector<std::string> lines;
  Log(into(lines)).info("x");
  before.empty() ? unsetenv("TZ") : setenv("TZ", before.c_str(), 1);
  tzset();
  EXPECT_TRUE(lines.at(0).starts_with("2026-03-01T09:30:00.250Z")) << lines[0];
}

TEST(Log, GivesWholeLinesToTheSinkFromManyThreads) {
  std::vector<std::string> lines;
  const Log log(into(lines));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([mine = log.for_rank(rank)] {
        for (int i = 0; i < 100; ++i) mine.warning("same");
      });
    }
  }
  EXPECT_EQ(lines.size(), 300u);
  for (const auto& line : lines) EXPECT_TRUE(line.ends_with(": same")) << line;
}

TEST(Log, SurvivesASinkThatThrows) {
  LogOptions options;
  options.sink = [](std::string_view) { throw std::runtime_error("full"); };
  testing::internal::CaptureStderr();
  EXPECT_NO_THROW(Log(options).error("x"));
  testing::internal::GetCapturedStderr();
}

TEST(Log, SpeaksOnStandardErrorByDefault) {
  testing::internal::CaptureStderr();
  Log().info("hello");
  const auto text = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(text.ends_with("Z info    rank 0: hello\n")) << text;
}
