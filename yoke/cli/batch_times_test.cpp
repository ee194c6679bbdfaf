// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/batch_times.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"
#include "yoke/serve/batch_trace.h"

namespace yoke::cli {
namespace {

// Batches of 1 ms, 20 us apart: 100 us there and 50 us back, timed 30 us after they began.
void add_batches(serve::BatchTrace& trace, int replica, int64_t begin_us) {
  for (int i = 0; i < 4; ++i) {
    const int64_t begun = (begin_us + 1020 * i) * 1000;
    trace.add({.replica = replica,
               .rows = 2,
               .sealed_at = begun,
               .begun_at = begun,
               .computed_at = begun + 1'000'000,
               .done_at = begun + 1'000'000,
               .copy_in = 100'000,
               .copy_out = 50'000,
               .copies = 970'000});
  }
}

TEST(BatchTimes, CopiesBesideAnothersKernels) {
  serve::BatchTrace trace(100);
  add_batches(trace, 0, 0);
  add_batches(trace, 1, 500);  // copies fall into the middle of the other one's kernels
  const auto times = read_batch_times(trace.json());
  EXPECT_EQ(times.batches, 8);
  EXPECT_NEAR(times.idle_us, 20, 1e-6);
  EXPECT_NEAR(times.model_us, 1000, 1e-6);
  EXPECT_NEAR(times.copy_in_us, 100, 1e-6);
  EXPECT_NEAR(times.copy_out_us, 50, 1e-6);
  EXPECT_NEAR(times.beside, 1, 1e-6);
}

TEST(BatchTimes, CopiesAtTheSameTime) {
  serve::BatchTrace trace(100);
  add_batches(trace, 0, 0);
  add_batches(trace, 1, 0);
  EXPECT_NEAR(read_batch_times(trace.json()).beside, 0, 1e-6);
  serve::BatchTrace half(100);
  add_batches(half, 0, 0);
  add_batches(half, 1, 25);  // 25 us of its copies there, and of the other's back
  // The last one back ends after the other: it is not counted.
  EXPECT_NEAR(read_batch_times(half.json()).beside, 4 * 50 / (8 * 150.0 - 50), 1e-6);
}

TEST(BatchTimes, RefusesOtherFiles) { EXPECT_THROW(read_batch_times("[1, 2]"), Error); }

}  // namespace
}  // namespace yoke::cli
