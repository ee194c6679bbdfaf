// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/flight_recorder.h"

#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::observe;
using namespace std::chrono_literals;

TEST(FlightRecorder, DescribesARankThatDidNothing) {
  const ManualClock clock;
  EXPECT_EQ(FlightRecorder(1, 4, clock).describe(0), "no operation yet");
}

TEST(FlightRecorder, DescribesWhatARankWaitsForAndHowLong) {
  ManualClock clock;
  FlightRecorder recorder(3, 4, clock);
  recorder.name_group(7, "world");
  recorder.post(2, {.kind = "all_reduce", .group = 7, .sequence = 17, .bytes = 4 << 20});
  clock.advance(31s);
  EXPECT_EQ(recorder.describe(2), "all_reduce #17 on world, 4 MiB, waiting for 31 s");
}

TEST(FlightRecorder, DescribesWhatARankFinishedLast) {
  ManualClock clock;
  FlightRecorder recorder(2, 4, clock);
  recorder.name_group(0, "world");
  const auto ticket = recorder.post(1, {.kind = "barrier", .sequence = 16});
  recorder.finish(1, ticket);
  clock.advance(2s);
  EXPECT_EQ(recorder.describe(1), "finished barrier #16 on world 2 s ago");
}

TEST(FlightRecorder, DescribesTheOldestOfSeveralInFlight) {
  ManualClock clock;
  FlightRecorder recorder(1, 8, clock);
  recorder.post(0, {.kind = "send", .group = 3, .sequence = 1, .bytes = 64, .peer = 5});
  clock.advance(1s);
  const auto later = recorder.post(0, {.kind = "recv", .group = 3, .sequence = 2});
  recorder.post(0, {.kind = "recv", .group = 3, .sequence = 3});
  recorder.finish(0, later);
  EXPECT_EQ(recorder.describe(0),
            "send #1 on group 3 with rank 5, 64 B, waiting for 1 s, 1 more in flight");
}

TEST(FlightRecorder, KeepsTheNewestRecordsOldestFirst) {
  ManualClock clock;
  FlightRecorder recorder(1, 3, clock);
  EXPECT_EQ(recorder.last(0), std::nullopt);
  for (uint64_t i = 0; i < 5; ++i) {
    recorder.post(0, {.kind = "barrier", .sequence = i});
    clock.advance(1s);
  }
  const auto records = recorder.records(0);
  ASSERT_EQ(records.size(), 3u);
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(records[i].flight.sequence, i + 2);
    EXPECT_EQ(records[i].posted, Time((i + 2) * 1s));
  }
  EXPECT_EQ(recorder.last(0)->flight.sequence, 4u);
}

TEST(FlightRecorder, LateFinishLeavesTheOverwritingEntryAlone) {
  ManualClock clock;
  FlightRecorder recorder(1, 2, clock);
  const auto first = recorder.post(0, {.kind = "send"});
  const auto second = recorder.post(0, {.kind = "recv"});
  recorder.post(0, {.kind = "barrier"});  // takes the place of the first
  recorder.finish(0, first);
  recorder.finish(0, second);
  const auto records = recorder.records(0);
  EXPECT_STREQ(records[0].flight.kind, "recv");
  EXPECT_EQ(records[0].finished, Time());
  EXPECT_STREQ(records[1].flight.kind, "barrier");
  EXPECT_EQ(records[1].finished, std::nullopt);
}

TEST(FlightRecorder, DumpShowsEveryRecordOfEveryRank) {
  ManualClock clock;
  FlightRecorder recorder(2, 4, clock);
  recorder.name_group(0, "world");
  const auto ticket =
      recorder.post(0, {.kind = "broadcast", .sequence = 1, .bytes = 4096, .peer = 1});
  clock.advance(3ms);
  recorder.finish(0, ticket);
  recorder.post(0, {.kind = "barrier", .sequence = 2});
  clock.advance(1s);
  std::ostringstream out;
  recorder.dump(out);
  EXPECT_EQ(
      out.str(),
      "rank 0: barrier #2 on world, waiting for 1 s\n"
      "  posted           operation                group            bytes      peer   took\n"
      "  1 s ago          broadcast #1             world            4 KiB      1      3 ms\n"
      "  1 s ago          barrier #2               world            0 B        -      in flight\n"
      "rank 1: no operation yet\n");
}

TEST(FlightRecorder, RefusesRanksAndTicketsThatDoNotExist) {
  const ManualClock clock;
  FlightRecorder recorder(2, 4, clock);
  EXPECT_THROW(recorder.post(2, {}), Error);
  EXPECT_THROW(recorder.describe(-1), Error);
  EXPECT_THROW(recorder.finish(0, 0), Error);
}

TEST(FlightRecorder, IsReadWhileEveryRankWrites) {
  const SteadyClock clock;
  FlightRecorder recorder(2, 16, clock);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      for (uint64_t i = 0; i < 2000; ++i)
        recorder.finish(rank, recorder.post(rank, {.kind = "barrier", .sequence = i}));
    });
  }
  for (int i = 0; i < 50; ++i) {
    for (const auto& record : recorder.records(i % 2)) EXPECT_STREQ(record.flight.kind, "barrier");
    std::ostringstream out;
    recorder.dump(out);
  }
  ranks.clear();
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(recorder.last(rank)->flight.sequence, 1999u);
}
