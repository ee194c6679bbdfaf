// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/box.h"

#include <gtest/gtest.h>

#include <set>

#include "yoke/base/rng.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

// Row-major places of the elements of a box, in their order.
std::vector<int64_t> elements(const std::vector<int64_t>& shape, const Box& box) {
  std::vector<int64_t> result;
  std::vector<int64_t> at(shape.size(), 0);
  for (int64_t i = 0; i < box.count(); ++i) {
    int64_t left = i, place = 0;
    for (size_t d = shape.size(); d-- > 0; left /= box.shape[d])
      at[d] = box.offset[d] + left % box.shape[d];
    for (size_t d = 0; d < shape.size(); ++d) place = place * shape[d] + at[d];
    result.push_back(place);
  }
  return result;
}

std::vector<int64_t> random_shape(const Rng& rng, size_t most) {
  std::vector<int64_t> shape(rng.below(0, most + 1));
  for (size_t d = 0; d < shape.size(); ++d) shape[d] = 1 + int64_t(rng.below(1 + d, 5));
  return shape;
}

}  // namespace

TEST(Box, ARangeIsAFewBoxesInItsOrder) {
  for (uint64_t trial = 0; trial < 2000; ++trial) {
    const Rng rng(1, "range", trial);
    const auto shape = random_shape(rng, 4);
    const int64_t all = whole_box(shape).count();
    const auto first = int64_t(rng.below(20, uint64_t(all + 1)));
    const auto count = int64_t(rng.below(21, uint64_t(all - first + 1)));
    const auto boxes = boxes_of_range(shape, first, count);
    EXPECT_LE(boxes.size(), std::max<size_t>(1, 2 * shape.size() - (shape.empty() ? 0 : 1)));
    std::vector<int64_t> seen, wanted;
    for (const auto& box : boxes)
      for (const int64_t place : elements(shape, box)) seen.push_back(place);
    for (int64_t i = first; i < first + count; ++i) wanted.push_back(i);
    ASSERT_EQ(seen, wanted) << trial;
  }
}

// Tensor parallel parts of parts, cut again into ranges as ZeRO does: every element once.
TEST(Box, WhatRanksHaveTilesTheTensor) {
  for (uint64_t trial = 0; trial < 500; ++trial) {
    const Rng rng(2, "tiles", trial);
    auto shape = random_shape(rng, 3);
    shape.push_back(1 + int64_t(rng.below(9, 4)));
    const int tp = 1 + int(rng.below(30, 4)), dp = 1 + int(rng.below(31, 4));
    Cut cut{.dim = int64_t(rng.below(32, shape.size())), .ranks = tp};
    for (uint64_t i = 0; i <= rng.below(33, 3); ++i)
      cut.parts.push_back(tp * int64_t(1 + rng.below(34 + i, 3)));
    int64_t sum = 0;
    for (const int64_t part : cut.parts) sum += part;
    shape[size_t(cut.dim)] = sum;
    auto local_shape = shape;
    local_shape[size_t(cut.dim)] /= tp;
    const int64_t count = whole_box(local_shape).count();
    std::vector<Box> boxes;
    for (cut.rank = 0; cut.rank < tp; ++cut.rank)
      for (int64_t shard = 0; shard < dp; ++shard) {
        const int64_t begin = count * shard / dp, end = count * (shard + 1) / dp;
        for (const auto& local : boxes_of_range(local_shape, begin, end - begin)) {
          int64_t covered = 0;
          for (const auto& placed : place(local, cut)) {
            EXPECT_EQ(placed.local.shape, placed.whole.shape);
            covered += placed.whole.count();
            boxes.push_back(placed.whole);
          }
          EXPECT_EQ(covered, local.count());
        }
      }
    EXPECT_EQ(find_gap(shape, boxes), std::nullopt) << trial;
    boxes.push_back(boxes.front());
    EXPECT_NE(find_gap(shape, boxes), std::nullopt);
    boxes.resize(boxes.size() - 2);
    EXPECT_NE(find_gap(shape, boxes), std::nullopt);
  }
}

TEST(Box, HasWhatTwoHaveInCommon) {
  EXPECT_EQ(intersect({{0, 2}, {4, 4}}, {{2, 0}, {4, 3}}), (Box{{2, 2}, {2, 1}}));
  EXPECT_EQ(intersect({{0}, {4}}, {{4}, {2}}), std::nullopt);
  EXPECT_EQ(intersect({}, {}), Box{});  // a number has one element
  EXPECT_EQ(to_text(Box{{0, 2}, {4, 6}}), "[0:4, 2:8]");
}

}  // namespace yoke::plan
