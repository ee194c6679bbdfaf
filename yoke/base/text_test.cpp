// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/text.h"

#include <gtest/gtest.h>

using namespace yoke;
using namespace std::chrono_literals;

TEST(Text, BytesHaveAtMostThreeDigits) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(64), "64 B");
  EXPECT_EQ(bytes_text(1536), "1.5 KiB");
  EXPECT_EQ(bytes_text(64 << 20), "64 MiB");
  EXPECT_EQ(bytes_text((1u << 20) - 1), "1 MiB");
  EXPECT_EQ(bytes_text(uint64_t{24} << 30), "24 GiB");
}

TEST(Text, DurationsReadAsPeopleSayThem) {
  EXPECT_EQ(duration_text(850ns), "850 ns");
  EXPECT_EQ(duration_text(1500us), "1.5 ms");
  EXPECT_EQ(duration_text(42s), "42 s");
  EXPECT_EQ(duration_text(200s), "3 min 20 s");
  EXPECT_EQ(duration_text(7500s), "2 h 5 min");
  EXPECT_EQ(duration_text(-2s), "-2 s");
  EXPECT_EQ(duration_text(Duration::min()), "-2562047 h 47 min");
}

TEST(Text, ParsesBytes) {
  EXPECT_EQ(parse_bytes("64"), 64u);
  EXPECT_EQ(parse_bytes("1k"), 1024u);
  EXPECT_EQ(parse_bytes("4M"), 4u << 20);
  EXPECT_EQ(parse_bytes("1.5 GiB"), 3u << 29);
  for (const char* bad : {"", "x", "4Q", "-1", "1.2", "4Mx", "1e30"})
    EXPECT_EQ(parse_bytes(bad), std::nullopt) << bad;
}

TEST(Text, ParsesDurations) {
  EXPECT_EQ(parse_duration("90"), 90s);
  EXPECT_EQ(parse_duration("250ms"), 250ms);
  EXPECT_EQ(parse_duration("1.5h"), 90min);
  for (const char* bad : {"", "fast", "-1s", "1 year"})
    EXPECT_EQ(parse_duration(bad), std::nullopt) << bad;
}

TEST(Text, ParsesWholeIntegersOnly) {
  EXPECT_EQ(parse_int("-12"), -12);
  for (const char* bad : {"", "1x", "1.0", "99999999999999999999"})
    EXPECT_EQ(parse_int(bad), std::nullopt) << bad;
}

TEST(Text, SplitAndJoinAreInverse) {
  EXPECT_EQ(split("a,,b", ','), (std::vector<std::string>{"a", "", "b"}));
  EXPECT_EQ(join(split("a,,b", ','), ","), "a,,b");
  EXPECT_EQ(split("", ','), std::vector<std::string>{""});
}

TEST(Text, NearestFindsTheTypo) {
  const std::vector<std::string> keys{"layers", "lr", "lr_schedule", "batch", "micro_batch"};
  EXPECT_EQ(nearest("layer", keys).front(), "layers");
  EXPECT_EQ(nearest("bacth", keys).front(), "batch");
  EXPECT_TRUE(nearest("completely_else", keys).empty());
  EXPECT_TRUE(nearest("foo", {"gloo"}).empty());
}
