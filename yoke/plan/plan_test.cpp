// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/plan.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"

namespace yoke::plan {
namespace {

std::string refusal(const std::string& text, int ranks, int layers) {
  try {
    parse_plan(text).check(ranks, layers);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Config);
    return error.what();
  }
  return "accepted";
}

void expect_refusal(const std::string& text, int ranks, int layers, const std::string& why) {
  const std::string what = refusal(text, ranks, layers);
  EXPECT_NE(what.find(why), std::string::npos) << what;
}

}  // namespace

TEST(Plan, TextIsReadBackAsItWas) {
  for (const std::string text :
       {"", "pp=2 dp=3 schedule=zbv micro=4 zero=1", "pp=2 chunks=3 layers=4,5,5,4",
        "tp=2 sequence=yes split=*.up:outputs split=*.qkv:outputs:64,32,32 split=0:words",
        "tie=0.weight,17.weight tie=a,b,c"})
    EXPECT_EQ(to_text(parse_plan(text)), text);
  EXPECT_EQ(parse_plan("  tp=2\n\tpp=3 "), parse_plan("pp=3 tp=2"));
}

TEST(Plan, IsRefusedInNumbers) {
  EXPECT_EQ(refusal("pp=2 dp=2 micro=2", 4, 6), "accepted");
  expect_refusal("pp=2 dp=2 micro=2", 6, 6, "2 x 2 x 1 = 4 ranks, and there are 6");
  expect_refusal("zero=4", 1, 6, "zero is 0 to 3, got 4");
  expect_refusal("sequence=yes", 1, 6, "tp is 1");
  expect_refusal("pp=4 schedule=zbv micro=8", 4, 6, "has 8 stages, and the model 6 layers");
  expect_refusal("pp=2 schedule=interleaved micro=3", 2, 6, "plan: ");
  expect_refusal("pp=2 micro=2 layers=3,4", 2, 6, "2 stages with 7 layers");
  expect_refusal("pp=2 micro=2 layers=0,6", 2, 6, "no stage is empty");
  expect_refusal("tie=a,b tie=b,c", 1, 6, "'b' is tied twice");
  expect_refusal("pp=2 pp=2", 2, 6, "pp is said twice");
  expect_refusal("split=x:inputs:64,32", 1, 6, "only outputs have parts");
  expect_refusal("micor=2", 1, 1, "did you mean micro?");
  expect_refusal("pp=two", 1, 1, "'two' is not a number");
  expect_refusal("split=up", 1, 1, "split=PATTERN:KIND");
  expect_refusal("schedule=1f2b", 1, 1, "1f1b");
}

TEST(Plan, PatternsMatchWholeNames) {
  EXPECT_TRUE(matches("*.up", "3.mlp.up"));
  EXPECT_TRUE(matches("3.*.up", "3.mlp.up"));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_FALSE(matches("*.up", "3.mlp.upper"));
  EXPECT_FALSE(matches("up", "3.up"));
}

}  // namespace yoke::plan
