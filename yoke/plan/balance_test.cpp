// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/balance.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"

namespace yoke::plan {

TEST(Balance, MakesTheDearestPartAsCheapAsCanBe) {
  EXPECT_EQ(balance({1, 1, 1, 1, 1, 1, 1}, 3), (std::vector<int>{2, 2, 3}));
  EXPECT_EQ(balance({1, 1, 1, 1, 5}, 2), (std::vector<int>{4, 1}));
  EXPECT_EQ(balance({9, 1, 1, 1}, 4), (std::vector<int>{1, 1, 1, 1}));
  EXPECT_THROW(balance({1, 1}, 3), Error);
  EXPECT_THROW(balance({1, -1}, 1), Error);
}

}  // namespace yoke::plan
