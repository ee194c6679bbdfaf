// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/firing_order.h"

#include <gtest/gtest.h>

#include "yoke/base/clock.h"

namespace yoke::flow {
namespace {

using Places = std::vector<size_t>;

TEST(FiringOrder, GoesOnAsDeclaredWithWhoeverHasWhatItTakes) {
  // 0 takes two of what 2 gives one of at a time; 1 has a value from the round before.
  const std::vector<FiringLink> links{{.from = 2, .to = 0, .takes = 2},
                                      {.from = 0, .to = 1, .held = 1},
                                      {.from = -1, .to = 2, .held = INT32_MAX}};
  EXPECT_EQ(firing_order({1, 1, 2}, links, {-1, -1, -1}), (Places{1, 2, 2, 0}));
  EXPECT_EQ(firing_order({1, 1, 2}, links, {-1, 0, -1}), (Places{2, 2, 0, 1}));
}

TEST(FiringOrder, PutsWhoCannotFireLast) {
  const std::vector<FiringLink> circle{{.from = 0, .to = 1}, {.from = 1, .to = 0}};
  EXPECT_EQ(firing_order({2, 1, 1}, circle, {-1, -1, -1}), (Places{2, 0, 0, 1}));
}

// Each pass over all would be 10^10 questions.
TEST(FiringOrder, AChainThatIsDeclaredBackwardsIsNoLonger) {
  const int count = 100'000;
  std::vector<FiringLink> links;
  for (int k = 1; k < count; ++k) links.push_back({.from = k, .to = k - 1});
  const Time begin = SteadyClock().now();
  const auto order =
      firing_order(std::vector<int64_t>(count, 1), links, std::vector<int>(count, -1));
  EXPECT_LT(SteadyClock().now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(order.front(), size_t(count - 1));
  EXPECT_EQ(order.back(), 0u);
}

}  // namespace
}  // namespace yoke::flow
