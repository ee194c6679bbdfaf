// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <thread>

#include "yoke/base/crc32c.h"
#include "yoke/base/error.h"
#include "yoke/base/event_count.h"
#include "yoke/base/process.h"
#include "yoke/base/queue.h"

using namespace yoke;
using namespace std::chrono_literals;

TEST(Error, CarriesKindAndTheJoinedParts) {
  try {
    fail(Kind::Config, "got ", 3, ", wanted ", 4);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Config);
    EXPECT_STREQ(error.what(), "got 3, wanted 4");
  }
}

TEST(Error, CheckNamesTheConditionAndThePlace) {
  try {
    YOKE_CHECK(1 + 1 == 3, "sum is ", 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Internal);
    EXPECT_NE(std::string(error.what()).find("1 + 1 == 3 failed: sum is 2"), std::string::npos);
  }
}

TEST(Clock, ManualClockMovesOnlyWhenTold) {
  ManualClock clock;
  const Time start = clock.now();
  EXPECT_EQ(clock.now(), start);
  clock.advance(5s);
  EXPECT_EQ(clock.now() - start, 5s);
}

TEST(BoundedQueue, KeepsOrderAndRefusesWhenFull) {
  BoundedQueue<int> queue(2);
  EXPECT_TRUE(queue.push(1, 0s));
  EXPECT_TRUE(queue.push(2, 0s));
  EXPECT_FALSE(queue.push(3, 1ms));
  EXPECT_EQ(queue.pop(0s), 1);
  EXPECT_EQ(queue.pop(0s), 2);
  EXPECT_EQ(queue.pop(1ms), std::nullopt);
}

TEST(BoundedQueue, RefusedItemIsNotMovedFrom) {
  BoundedQueue<std::string> queue(1);
  std::string kept = "kept";
  ASSERT_TRUE(queue.push("first", 0s));
  EXPECT_FALSE(queue.push(kept, 0s));
  EXPECT_EQ(kept, "kept");
}

TEST(BoundedQueue, CloseWakesTheWaitingAndDrainsTheRest) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.push(7, 0s));
  bool pushed = true;
  std::jthread producer([&] { pushed = queue.push(8, 60s); });
  queue.close();
  producer.join();
  EXPECT_FALSE(pushed);
  EXPECT_EQ(queue.pop(60s), 7);
  EXPECT_EQ(queue.pop(60s), std::nullopt);
}

TEST(BoundedQueue, PassesEveryItemOnceBetweenManyThreads) {
  BoundedQueue<int> queue(4);
  std::atomic<int64_t> sum{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        while (auto item = queue.pop(10s)) sum += *item;
      });
    }
    std::vector<std::jthread> producers;
    for (int t = 0; t < 3; ++t) {
      producers.emplace_back([&] {
        for (int i = 1; i <= 1000; ++i) ASSERT_TRUE(queue.push(i, 10s));
      });
    }
    producers.clear();
    queue.close();
  }
  EXPECT_EQ(sum, 3 * 500500);
}

TEST(EventCount, WaitEndsAtTheDeadline) {
  EventCount event;
  const Time deadline = SteadyClock().now() + 20ms;
  event.wait(event.key(), deadline);
  EXPECT_GE(SteadyClock().now(), deadline);
}

TEST(EventCount, NotificationAfterTheKeyIsNeverMissed) {
  EventCount event;
  std::atomic<int> turn{0};
  auto play = [&](int me) {
    for (int round = 0; round < 2000; ++round) {
      while (turn.load() % 2 != me) {
        const auto seen = event.key();
        if (turn.load() % 2 == me) break;
        event.wait(seen, SteadyClock().now() + 10s);
      }
      ++turn;
      event.notify_all();
    }
  };
  const Time start = SteadyClock().now();
  std::jthread other([&] { play(1); });
  play(0);
  other.join();
  EXPECT_EQ(turn, 4000);
  EXPECT_LT(SteadyClock().now() - start, 9s);  // one missed wake would cost ten seconds
}

TEST(Process, GivesExitCodeAndBothStreams) {
  const auto result = run_process({"sh", "-c", "echo out; echo err >&2; exit 3"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.err, "err\n");
  EXPECT_FALSE(result.timed_out);
}

TEST(Process, PassesTheEnvironmentOn) {
  const auto result = run_process({"sh", "-c", "echo $YOKE_X"}, {.environment = {"YOKE_X=42"}});
  EXPECT_EQ(result.out, "42\n");
}

TEST(Process, KillsTheWholeGroupAtTheDeadline) {
  const Time start = SteadyClock().now();
  const auto result = run_process({"sh", "-c", "sleep 60 & sleep 60"}, {.timeout = 100ms});
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.exit_code, 128 + 9);
  EXPECT_LT(SteadyClock().now() - start, 30s);
}

TEST(Process, ConversesLineByLine) {
  using namespace std::chrono_literals;
  Conversation echo({"sh", "-c", "while read -r line; do echo \"<$line>\"; done"});
  echo.say("one");
  EXPECT_EQ(echo.hear(10s), "<one>");
  echo.say("two");
  echo.say("three");
  EXPECT_EQ(echo.hear(10s), "<two>");
  EXPECT_EQ(echo.hear(10s), "<three>");
  EXPECT_THROW(echo.hear(10ms), Error);
  // What it says on stderr does not hold it up, whatever the length; its end is kept.
  Conversation wordy(
      {"sh", "-c", "head -c 3000000 /dev/zero >&2; exec 2>&-; sleep 0.1; echo ready"});
  EXPECT_EQ(wordy.hear(std::chrono::seconds(20)), "ready");
  Conversation brief({"sh", "-c", "echo gone >&2; exit 3"});
  try {
    brief.hear(10s);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("has ended: gone"), std::string::npos) << error.what();
  }
}

TEST(Process, MissingProgramIsAnIoError) {
  try {
    run_process({"no-such-program-here"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Io);
    EXPECT_NE(std::string(error.what()).find("no-such-program-here"), std::string::npos);
  }
}

TEST(Crc32c, AgreesWithPublishedValuesHoweverItIsCut) {
  const std::string digits = "123456789";
  EXPECT_EQ(crc32c(digits.data(), digits.size()), 0xe3069283u);
  const std::string zeros(32, '\0');  // RFC 3720, B.4
  EXPECT_EQ(crc32c(zeros.data(), zeros.size()), 0x8a9136aau);
  std::string text;
  for (int i = 0; i < 100; ++i) text += std::to_string(i);
  for (size_t cut = 0; cut <= text.size(); ++cut)
    EXPECT_EQ(crc32c(text.data() + cut, text.size() - cut, crc32c(text.data(), cut)),
              crc32c(text.data(), text.size()));
}
