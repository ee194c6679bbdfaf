// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <thread>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::observe;

namespace {

std::string text_of(const Registry& registry) {
  std::ostringstream out;
  registry.write_prometheus(out);
  return out.str();
}

}  // namespace

TEST(Registry, WritesCountersAndGaugesInOrderOfNames) {
  Registry registry;
  registry.gauge("yoke_loss", "Loss of the last step.").set(2.5);
  registry.counter("yoke_bytes_total", "Bytes sent.", {{"rank", "1"}, {"op", "send"}}).add(1e6);
  registry.counter("yoke_bytes_total", "Bytes sent.", {{"rank", "0"}, {"op", "send"}}).add();
  EXPECT_EQ(text_of(registry),
            "# HELP yoke_bytes_total Bytes sent.\n"
            "# TYPE yoke_bytes_total counter\n"
            "yoke_bytes_total{op=\"send\",rank=\"0\"} 1\n"
            "yoke_bytes_total{op=\"send\",rank=\"1\"} 1000000\n"
            "# HELP yoke_loss Loss of the last step.\n"
            "# TYPE yoke_loss gauge\n"
            "yoke_loss 2.5\n");
}

TEST(Registry, WritesHistogramsWithCumulativeBuckets) {
  Registry registry;
  auto& histogram =
      registry.histogram("yoke_wait_seconds", "Time waited.", {0.001, 0.1, 1}, {{"op", "recv"}});
  for (double value : {0.0005, 0.001, 0.05, 0.5, 30.0}) histogram.observe(value);
  EXPECT_EQ(text_of(registry),
            "# HELP yoke_wait_seconds Time waited.\n"
            "# TYPE yoke_wait_seconds histogram\n"
            "yoke_wait_seconds_bucket{op=\"recv\",le=\"0.001\"} 2\n"
            "yoke_wait_seconds_bucket{op=\"recv\",le=\"0.1\"} 3\n"
            "yoke_wait_seconds_bucket{op=\"recv\",le=\"1\"} 4\n"
            "yoke_wait_seconds_bucket{op=\"recv\",le=\"+Inf\"} 5\n"
            "yoke_wait_seconds_sum{op=\"recv\"} 30.5515\n"
            "yoke_wait_seconds_count{op=\"recv\"} 5\n");
}

TEST(Registry, EscapesHelpAndLabelValues) {
  Registry registry;
  registry.gauge("x", "a \"quoted\" \\ line\nbreak", {{"path", "C:\\d \"q\"\nend"}}).set(1);
  EXPECT_EQ(text_of(registry),
            "# HELP x a \"quoted\" \\\\ line\\nbreak\n"
            "# TYPE x gauge\n"
            "x{path=\"C:\\\\d \\\"q\\\"\\nend\"} 1\n");
}

TEST(Registry, WritesNumbersAsPrometheusReadsThem) {
  Registry registry;
  auto& gauge = registry.gauge("x", "");
  auto written = [&] {
    const auto text = text_of(registry);
    return text.substr(text.find("\nx ") + 3);
  };
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto& [value, expected] :
       std::vector<std::pair<double, std::string>>{{0, "0\n"},
                                                   {-3, "-3\n"},
                                                   {0.1, "0.1\n"},
                                                   {1e-9, "1e-09\n"},
                                                   {1e300, "1e+300\n"},
                                                   {4503599627370497, "4503599627370497\n"},
                                                   {infinity, "+Inf\n"},
                                                   {-infinity, "-Inf\n"},
                                                   {std::nan(""), "NaN\n"}}) {
    gauge.set(value);
    EXPECT_EQ(written(), expected);
  }
}

TEST(Registry, SameNameAndLabelsAreTheSameMetricInAnyOrder) {
  Registry registry;
  auto& first = registry.counter("x_total", "X.", {{"a", "1"}, {"b", "2"}});
  EXPECT_EQ(&registry.counter("x_total", "X.", {{"b", "2"}, {"a", "1"}}), &first);
  EXPECT_NE(&registry.counter("x_total", "X.", {{"b", "2"}, {"a", "3"}}), &first);
}

TEST(Registry, RefusesWhatPrometheusWouldNotRead) {
  Registry registry;
  registry.counter("taken", "");
  registry.histogram("h", "", {1, 2});
  EXPECT_THROW(registry.gauge("taken", "", {{"a", "b"}}), Error);
  EXPECT_THROW(registry.histogram("h", "", {1, 3}), Error);
  EXPECT_THROW(registry.histogram("falling", "", {2, 1}), Error);
  for (const char* bad : {"", "1x", "a-b", "a b", "é"})
    EXPECT_THROW(registry.counter(bad, ""), Error) << bad;
  for (const char* bad : {"", "1x", "a:b", "le", "__x"})
    EXPECT_THROW(registry.counter("good", "", {{bad, "1"}}), Error) << bad;
  EXPECT_THROW(registry.counter("good", "", {{"a", "1"}, {"a", "2"}}), Error);
  EXPECT_EQ(text_of(registry).find("falling"), std::string::npos);
}

TEST(Counter, NeverFalls) {
  Counter counter;
  EXPECT_THROW(counter.add(-1), Error);
  EXPECT_THROW(counter.add(std::nan("")), Error);
  EXPECT_EQ(counter.value(), 0);
}

TEST(Gauge, IsSetAndMovedBothWays) {
  Gauge gauge;
  gauge.set(3);
  gauge.add(-5);
  EXPECT_EQ(gauge.value(), -2);
}

TEST(Histogram, PutsAValueIntoTheFirstBucketThatHoldsIt) {
  Histogram histogram({1, 2});
  for (double value : {-1.0, 1.0, 1.5, 2.0, 2.5, std::nan("")}) histogram.observe(value);
  EXPECT_EQ(histogram.counts(), (std::vector<uint64_t>{2, 2, 2}));
}

TEST(Histogram, ExponentialBoundsGrowByTheFactor) {
  EXPECT_EQ(exponential_bounds(0.5, 4, 3), (std::vector<double>{0.5, 2, 8}));
}

TEST(Metrics, CountExactlyFromManyThreads) {
  Registry registry;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) {
          registry.counter("n_total", "N.").add();
          registry.gauge("g", "G.").add(2);
          registry.histogram("h", "H.", {1}).observe(1);
          if (i % 100 == 0) text_of(registry);
        }
      });
    }
  }
  EXPECT_EQ(registry.counter("n_total", "N.").value(), 4000);
  EXPECT_EQ(registry.gauge("g", "G.").value(), 8000);
  EXPECT_EQ(registry.histogram("h", "H.", {1}).counts()[0], 4000u);
  EXPECT_EQ(registry.histogram("h", "H.", {1}).sum(), 4000);
}
