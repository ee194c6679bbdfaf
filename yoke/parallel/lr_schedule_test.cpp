// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/lr_schedule.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"

namespace yoke::parallel {

using Shape = LrSchedule::Shape;

TEST(LrSchedule, WarmsUpAndKeepsItsShape) {
  LrSchedule schedule{.lr = 1, .warmup = 4, .steps = 24, .lowest = 0.1};
  for (const auto shape : {Shape::Constant, Shape::Cosine, Shape::Linear, Shape::Wsd}) {
    schedule.shape = shape;
    EXPECT_DOUBLE_EQ(schedule.at(0), 0.25);
    EXPECT_DOUBLE_EQ(schedule.at(3), 1);
    EXPECT_DOUBLE_EQ(schedule.at(4), 1);
    EXPECT_DOUBLE_EQ(schedule.at(24), shape == Shape::Constant ? 1 : 0.1);
    EXPECT_DOUBLE_EQ(schedule.at(99), schedule.at(24));
    for (int64_t step = 4; step < 30; ++step) EXPECT_LE(schedule.at(step + 1), schedule.at(step));
  }
  schedule.shape = Shape::Cosine;
  EXPECT_DOUBLE_EQ(schedule.at(14), 0.55);
  schedule.shape = Shape::Linear;
  EXPECT_DOUBLE_EQ(schedule.at(19), 0.1 + 0.9 * 0.25);
  schedule.shape = Shape::Wsd;
  schedule.decay = 0.25;  // six steps
  EXPECT_DOUBLE_EQ(schedule.at(18), 1);
  EXPECT_DOUBLE_EQ(schedule.at(21), 0.55);
}

TEST(LrSchedule, RefusesWhatDoesNotFit) {
  EXPECT_NO_THROW((LrSchedule{.warmup = 10}.check()));
  EXPECT_THROW((LrSchedule{.shape = Shape::Cosine, .warmup = 10, .steps = 10}.check()), Error);
  EXPECT_THROW((LrSchedule{.lr = -1}.check()), Error);
  EXPECT_THROW((LrSchedule{.lowest = 2}.check()), Error);
  EXPECT_EQ(parse_lr_shape("wsd"), Shape::Wsd);
  EXPECT_THROW(parse_lr_shape("cosin"), Error);
}

}  // namespace yoke::parallel
