// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/loader.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <atomic>

#include "yoke/base/error.h"
#include "yoke/data/text_stream.h"

namespace yoke::data {
namespace {

Batch numbered(int64_t number) { return {at::full({1}, number, at::kLong)}; }
int64_t number_of(const Batch& batch) { return batch.input.item<int64_t>(); }

}  // namespace

TEST(Loader, GivesThemInOrderAndKeepsFew) {
  for (const int threads : {1, 3}) {
    std::atomic<int64_t> taken = 0, most = 0;
    Loader loader(
        [&](int64_t number) {
          most = std::max(most.load(), number - taken);
          return numbered(number);
        },
        threads, 4, std::chrono::seconds(20));
    for (int64_t i = 10; i < 200; ++i) {
      taken = i;
      ASSERT_EQ(number_of(loader.take(i)), i);
    }
    EXPECT_LE(most, 5);
    for (const int64_t i : {50, 51, 7, 8}) {  // after going back
      taken = i;
      EXPECT_EQ(number_of(loader.take(i)), i);
    }
  }
}

TEST(Loader, TellsWhatWentWrongAtItsTurn) {
  Loader loader(
      [](int64_t number) {
        if (number == 3) fail(Kind::Io, "'file' is bad at byte 7");
        return numbered(number);
      },
      2, 4, std::chrono::seconds(20));
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(number_of(loader.take(i)), i);
  EXPECT_THROW(loader.take(3), Error);
  EXPECT_EQ(number_of(loader.take(4)), 4);
}

TEST(Loader, DoesNotWaitForever) {
  std::atomic<bool> is_over = false;
  {
    Loader loader(
        [&](int64_t number) {
          while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return numbered(number);
        },
        1, 1, std::chrono::milliseconds(50));
    EXPECT_THROW(loader.take(0), Error);
    is_over = true;
  }
}

TEST(TextStream, KeepsBackHalfACharacter) {
  TextStream stream(byte_tokenizer());
  std::string text;
  std::vector<std::string> parts;
  for (const char c : std::string("a\xC3\xA9z\xE2\x82\xAC")) {
    parts.push_back(stream.add(uint8_t(c)));
    text += parts.back();
  }
  EXPECT_EQ(parts[1], "");
  EXPECT_EQ(parts[2], "\xC3\xA9");
  EXPECT_EQ(text, "a\xC3\xA9z\xE2\x82\xAC");
  EXPECT_EQ(stream.add(0xE2), "");
  EXPECT_EQ(stream.finish(), "\xE2");
}

}  // namespace yoke::data
