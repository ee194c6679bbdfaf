// SPDX-License-Identifier: Apache-2.0
// What observing costs where it is done most often. Judged in optimised builds only.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <thread>

#include "yoke/observe/flight_recorder.h"
#include "yoke/observe/metrics.h"
#include "yoke/observe/trace.h"

using namespace yoke;
using namespace yoke::observe;

namespace {

#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr bool kJudged = true;
#else
constexpr bool kJudged = false;
#endif

// Nanoseconds of one call: the best of many batches, which a busy machine disturbs least.
template <typename Call>
double cost_ns(const char* what, Call call) {
  constexpr int kBatch = 1000;
  const SteadyClock clock;
  Duration best = std::chrono::hours(1);
  for (int round = 0; round < 200; ++round) {
    const Time start = clock.now();
    for (int i = 0; i < kBatch; ++i) call();
    best = std::min(best, clock.now() - start);
  }
  const double ns = double(best.count()) / kBatch;
  std::cout << what << ": " << ns << " ns\n";
  return ns;
}

class Cost : public testing::Test {
 protected:
  void SetUp() override {
    if (!kJudged) GTEST_SKIP() << "not an optimised build without sanitizers";
    if (cost_ns("clock", [&] { clock_.now(); }) > 40)
      GTEST_SKIP() << "the clock of this machine is too slow to stay under 100 ns";
  }
  void TearDown() override {
    stop_ = true;
    stop_.notify_all();
  }
  SteadyClock clock_;

 private:
  // Locks are cheaper in a process of one thread, which is not what a run is.
  std::atomic<bool> stop_{false};
  std::jthread other_{[this] { stop_.wait(false); }};
};

}  // namespace

TEST_F(Cost, SpanIsUnderTwoNanosecondsWhenOff) {
  Tracer* volatile off = nullptr;
  EXPECT_LT(cost_ns("span, off", [&] { Span span(off, "off"); }), 2);
}

TEST_F(Cost, SpanIsUnderHundredNanosecondsWhenOn) {
  Tracer tracer(clock_);
  EXPECT_LT(cost_ns("span, on", [&] { Span span(&tracer, "on"); }), 100);
}

TEST_F(Cost, FlightRecorderPostIsUnderHundredNanoseconds) {
  FlightRecorder recorder(1, 1024, clock_);
  EXPECT_LT(cost_ns("post", [&] { recorder.post(0, {.kind = "all_reduce", .bytes = 64}); }), 100);
}

TEST_F(Cost, HistogramObservationIsUnderHundredNanoseconds) {
  Histogram histogram(exponential_bounds(1e-6, 2, 20));
  EXPECT_LT(cost_ns("observe", [&] { histogram.observe(1e-3); }), 100);
}
