// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

using namespace yoke;

// The known answers of the Random123 library for philox4x32-10.
TEST(Rng, PhiloxGivesThePublishedValues) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, AnyElementIsReachableAlone) {
  const Rng rng(1, "weights");
  EXPECT_EQ(Rng(1, "weights").bits(1'000'000'007), rng.bits(1'000'000'007));
}

TEST(Rng, SeedNameStepAndIndexEachChangeTheValue) {
  std::set<uint32_t> seen{Rng(1, "a", 0).bits(0), Rng(2, "a", 0).bits(0),
                          Rng(1, "b", 0).bits(0), Rng(1, "a", 1).bits(0),
                          Rng(1, "a", 0).bits(1), Rng(1, "a", 0).bits(uint64_t{1} << 32)};
  EXPECT_EQ(seen.size(), 6u);
}

TEST(Rng, UniformFillsTheUnitInterval) {
  const Rng rng(3, "u");
  double sum = 0, low = 1, high = 0;
  for (int i = 0; i < 100000; ++i) {
    const double x = rng.uniform(i);
    sum += x;
    low = std::min(low, x);
    high = std::max(high, x);
  }
  EXPECT_NEAR(sum / 100000, 0.5, 0.005);
  EXPECT_GE(low, 0.0);
  EXPECT_LT(high, 1.0);
  EXPECT_LT(low, 1e-3);
  EXPECT_GT(high, 1 - 1e-3);
}

TEST(Rng, NormalHasTheRightMoments) {
  const Rng rng(4, "n");
  double sum = 0, squares = 0, fourth = 0, neighbours = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = rng.normal(i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    neighbours += x * rng.normal(i + 1);
  }
  EXPECT_NEAR(sum / kCount, 0, 0.01);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
  EXPECT_NEAR(fourth / kCount, 3, 0.1);
  EXPECT_NEAR(neighbours / kCount, 0, 0.02);
}

TEST(Rng, BelowStaysBelowAndReachesEveryValue) {
  const Rng rng(5, "b");
  std::set<uint64_t> seen;
  for (int i = 0; i < 200; ++i) seen.insert(rng.below(i, 7));
  EXPECT_EQ(seen, (std::set<uint64_t>{0, 1, 2, 3, 4, 5, 6}));
}
