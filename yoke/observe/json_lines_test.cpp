// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/json_lines.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <thread>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::observe;

TEST(Json, ObjectKeepsItsFieldsInOrder) {
  const JsonObject object{{"z", 1}, {"a", true}, {"m", "text"}, {"none", nullptr}};
  EXPECT_EQ(object.text(), R"({"z":1,"a":true,"m":"text","none":null})");
  EXPECT_EQ(JsonObject().text(), "{}");
}

TEST(Json, NestsArraysAndObjects) {
  const JsonObject inner{{"rank", 2}};
  const JsonObject object{{"sizes", std::vector{64, 128}},
                          {"names", std::vector<std::string>{"a", "b\""}},
                          {"flags", std::vector{true, false}},
                          {"table", std::vector<std::vector<int>>{{1}, {}}},
                          {"inner", inner},
                          {"list", std::vector{inner, inner}}};
  EXPECT_EQ(object.text(),
            R"({"sizes":[64,128],"names":["a","b\""],"flags":[true,false],)"
            R"("table":[[1],[]],"inner":{"rank":2},"list":[{"rank":2},{"rank":2}]})");
}

TEST(Json, EscapesWhatJsonDoesNotAllowInStrings) {
  EXPECT_EQ(json_quote("a\"b\\c\n\r\t\x01\x1f\x7f"), R"("a\"b\\c\n\r\t\u0001\u001f\u007f")");
  EXPECT_EQ(json_quote(std::string_view("\0x", 2)), R"("\u0000x")");
  EXPECT_EQ(JsonObject({{"a\n", 1}}).text(), R"({"a\n":1})");
}

TEST(Json, KeepsUtf8AndReplacesWhatIsNot) {
  EXPECT_EQ(json_quote("é€😀"), "\"é€😀\"");
  EXPECT_EQ(json_quote("a\xff"
                       "b"),
            R"("a\ufffdb")");
  EXPECT_EQ(json_quote("\xe2\x82"), R"("\ufffd\ufffd")");            // cut short
  EXPECT_EQ(json_quote("\xc0\xaf"), R"("\ufffd\ufffd")");            // overlong
  EXPECT_EQ(json_quote("\xed\xa0\x80"), R"("\ufffd\ufffd\ufffd")");  // surrogate
  EXPECT_EQ(json_quote("\xf4\x90\x80\x80"), R"("\ufffd\ufffd\ufffd\ufffd")");
}

TEST(Json, NumbersReadBackAsTheSameNumber) {
  for (double value : {0.1, 1.0 / 3, 1e-7, 1e300, -5e-324, 123456789.125})
    EXPECT_EQ(std::strtod(Json(value).text().c_str(), nullptr), value);
  EXPECT_EQ(Json(0.1).text(), "0.1");
  EXPECT_EQ(Json(0.1f).text(), "0.1");
  EXPECT_EQ(Json(2.0).text(), "2");
  EXPECT_EQ(Json(std::numeric_limits<uint64_t>::max()).text(), "18446744073709551615");
  EXPECT_EQ(Json(std::numeric_limits<int64_t>::min()).text(), "-9223372036854775808");
}

TEST(Json, NumbersThatJsonCannotHoldAreNull) {
  EXPECT_EQ(Json(std::nan("")).text(), "null");
  EXPECT_EQ(Json(-std::numeric_limits<double>::infinity()).text(), "null");
  EXPECT_EQ(Json(std::vector{1.0, std::nan("")}).text(), "[1,null]");
}

TEST(JsonLines, WritesOneWholeLinePerObjectFromManyThreads) {
  std::ostringstream out;
  JsonLines lines(out);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) lines.write({{"value", 12345}});
      });
    }
  }
  std::istringstream in(out.str());
  int count = 0;
  for (std::string line; std::getline(in, line); ++count) ASSERT_EQ(line, R"({"value":12345})");
  EXPECT_EQ(count, 600);
}

TEST(JsonLines, OutputThatFailsIsAnIoError) {
  std::ostringstream out;
  out.setstate(std::ios::badbit);
  JsonLines lines(out);
  try {
    lines.write({});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Io);
  }
}
