// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/trace.h"

#include <gtest/gtest.h>

#include <sstream>

#include "yoke/base/error.h"
#include "yoke/observe/trace.h"

namespace yoke::cli {
namespace {

using observe::Category;
using namespace std::chrono_literals;

struct NoClock : Clock {
  Time now() const override { return Time(); }
};

}  // namespace

TEST(Trace, EveryMomentIsCountedOnce) {
  const NoClock clock;
  observe::Tracer tracer(clock);
  tracer.name_thread(3, "train");
  const auto at = [](Duration time) { return Time() + 1s + time; };
  tracer.record("0F0", Category::Compute, at(0ms), at(40ms));
  tracer.record("all_reduce", Category::Comm, at(10ms), at(20ms));  // inside of it
  tracer.record("data", Category::Data, at(12ms), at(14ms));        // inside of that
  tracer.record("recv", Category::Wait, at(40ms), at(70ms));
  tracer.record("optimizer", Category::Compute, at(90ms), at(100ms));
  std::ostringstream text;
  tracer.write_chrome_trace(text);
  const auto ranks = analyse_trace({text.str()}, 10);
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_EQ(ranks[0].rank, 3);
  EXPECT_NEAR(ranks[0].compute, 0.040, 1e-6);
  EXPECT_NEAR(ranks[0].comm, 0.008, 1e-6);
  EXPECT_NEAR(ranks[0].data, 0.002, 1e-6);
  EXPECT_NEAR(ranks[0].bubble, 0.030, 1e-6);
  EXPECT_NEAR(ranks[0].idle, 0.020, 1e-6);
  EXPECT_EQ(ranks[0].picture, "#=##...  #");
  std::ostringstream later;
  tracer.write_chrome_trace(later, at(40ms));
  EXPECT_NEAR(analyse_trace({later.str()}, 10)[0].compute, 0.010, 1e-6);
  EXPECT_THROW(analyse_trace({"[]"}, 10), Error);
}

}  // namespace yoke::cli
