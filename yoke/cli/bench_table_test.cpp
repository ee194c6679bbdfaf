// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_table.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::cli;

namespace {

std::string said_at_the_end(const BenchTable& bench) {
  try {
    bench.end();
  } catch (const Error& error) {
    return cat(exit_code(error.kind()), ": ", error.what());
  }
  return "";
}

}  // namespace

TEST(BenchTable, EndsWellOnlyWhereEveryTargetWasReached) {
  BenchTable bench{.json = true};
  bench.report({.bench = "t", .what = "has none", .got = 7});
  bench.report({.bench = "t", .what = "reached", .got = 5, .least = 5, .most = 5});
  EXPECT_EQ(said_at_the_end(bench), "");
  bench.report({.bench = "t", .what = "too little", .got = 4.9, .least = 5});
  bench.report({.bench = "t", .what = "too much", .got = 1, .most = 0});
  EXPECT_EQ(said_at_the_end(bench),
            "1: 2 figures missed their targets; wanted none, see \"passed\":false");
  bench.wrong = 3;
  EXPECT_EQ(said_at_the_end(bench), "1: 3 answers were wrong; wanted none");
}
