// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/layout.h"

#include <gtest/gtest.h>

#include <numeric>

#include "yoke/base/error.h"

namespace yoke::plan {

std::vector<Parameter> model() {
  return {{"a.weight", {10, 10}}, {"a.bias", {10}}, {"b.weight", {5, 100}}, {"b.bias", {1}}};
}

TEST(Layout, PutsParametersAtAlignedStartsMatricesFirst) {
  const auto layout = make_layout(model(), {{3, 2, 1, 0}}, 2, {.usual = 1000, .first = 1});
  EXPECT_EQ(layout.text(),
            "bucket 0: 128 in 2 of 64: b.bias@0\n"
            "bucket 1: 768 in 2 of 384: b.weight@0 a.weight@512 a.bias@640\n");
  EXPECT_EQ(layout.num_elements(), 611);
  EXPECT_EQ(layout.num_padded(), 896);
}

TEST(Layout, TakesBucketsAsGiven) {
  const auto layout = make_layout(model(), std::vector<std::vector<int>>{{0, 1}, {2, 3}}, 3);
  EXPECT_EQ(layout.text(),
            "bucket 0: 192 in 3 of 64: a.weight@0 a.bias@128\n"
            "bucket 1: 576 in 3 of 192: b.weight@0 b.bias@512\n");
  EXPECT_THROW(make_layout(model(), std::vector<std::vector<int>>{{0, 1}, {2}}, 1), Error);
  EXPECT_THROW(make_layout(model(), std::vector<std::vector<int>>{{0, 1, 1}, {2, 3}}, 1), Error);
}

TEST(Layout, CutsEveryElementIntoExactlyOneShard) {
  for (const int num_shards : {1, 2, 3, 4, 7}) {
    const auto layout =
        make_layout(model(), {{0, 1, 2, 3}}, num_shards, {.usual = 300, .first = 50});
    std::vector<std::vector<int>> times;
    for (const auto& parameter : layout.parameters)
      times.emplace_back(size_t(parameter.count()), 0);
    for (const auto& bucket : layout.buckets) {
      EXPECT_EQ(layout.shard_count(bucket) % kAlign, 0);
      for (int shard = 0; shard < num_shards; ++shard)
        for (const auto& piece : layout.pieces(bucket, shard)) {
          EXPECT_LE(piece.offset + piece.count, layout.shard_count(bucket));
          for (int64_t i = 0; i < piece.count; ++i)
            ++times[size_t(piece.parameter)][size_t(piece.first + i)];
        }
    }
    for (const auto& each : times)
      EXPECT_EQ(std::accumulate(each.begin(), each.end(), 0), int(each.size()));
  }
}

TEST(Layout, GrowsBucketByBucket) {
  Layout layout{.num_shards = 2};
  layout.buckets.resize(2);
  put_bucket(layout, 1, {{"a.weight", {10, 10}}, {"a.bias", {10}}});
  put_bucket(layout, 0, {{"b.weight", {5, 100}}, {"b.bias", {1}}});
  EXPECT_EQ(layout.text(),
            "bucket 0: 640 in 2 of 320: b.weight@0 b.bias@512\n"
            "bucket 1: 256 in 2 of 128: a.weight@0 a.bias@128\n");
}

TEST(Layout, AnEmptyParameterHasASlot) {
  const auto layout = make_layout({{"none", {0, 4}}, {"scalar", {}}}, {{0, 1}}, 2, {10, 10});
  EXPECT_EQ(layout.text(), "bucket 0: 128 in 2 of 64: none@0 scalar@0\n");
}

TEST(Layout, MemoryFollowsTheZeroFormulas) {
  std::vector<Parameter> parameters;
  std::vector<int> order;
  for (int i = 0; i < 64; ++i) {
    parameters.push_back({std::to_string(i), {256, 256}});
    order.push_back(i);
  }
  const int64_t count = 64 * 65536, d = 4;
  const auto layout = make_layout(parameters, {order}, int(d), {.usual = 65536, .first = 65536});
  const Widths bf16{.parameter = 2, .gradient = 4, .optimizer = 12};
  EXPECT_EQ(memory_of(layout, 0, bf16).total(), 18 * count);
  EXPECT_EQ(memory_of(layout, 1, bf16).total(), 6 * count + 12 * count / d);
  EXPECT_EQ(memory_of(layout, 2, bf16).total(), 2 * count + 16 * count / d + 2 * 4 * 65536);
  EXPECT_EQ(memory_of(layout, 3, bf16).total(), 18 * count / d + 2 * 4 * 65536 + 2 * 2 * 65536);
}

}  // namespace yoke::plan
