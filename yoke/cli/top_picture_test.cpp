// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/top_picture.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::cli {
namespace {

using Json = nlohmann::json;

// Two views of one server, two seconds apart. Between them a replica came back, and counts its busy
// time anew; a model is new.
constexpr const char* kBefore = R"({"ready":true,"draining":false,"devices":2,"time_s":100.5,
  "models":[{"name":"s","version":"1","state":"READY","reason":"","waiting":3,
             "rows":1000,"batches":200,"requests":500,"failed":7}],
  "replicas":[{"replica":0,"model":"s","device":"cpu#0","state":"ready","restarts":0,"computing":4,
               "staged":4,"pid":10,"batches":120,"rows":600,"busy_s":1.25},
              {"replica":1,"model":"s","device":"cpu#1","state":"dead","restarts":0,"computing":0,
               "staged":0,"pid":0,"batches":80,"rows":400,"busy_s":0.75}],
  "tenants":[{"name":"alice","guaranteed":0.5,"ceiling":1.0,"waiting":3,"device_s":1.5,
              "borrowed_s":0.25,"refused":0,"p50_ms":12.0,"p99_ms":40.0},
             {"name":"bob","guaranteed":0.4,"ceiling":0.6,"waiting":0,"device_s":0.5,
              "borrowed_s":0.0,"refused":10,"p50_ms":0.0,"p99_ms":0.0}]})";
constexpr const char* kNow = R"({"ready":true,"draining":false,"devices":2,"time_s":102.5,
  "models":[{"name":"s","version":"1","state":"READY","reason":"","waiting":12,
             "rows":2600,"batches":400,"requests":900,"failed":8},
            {"name":"wide","version":"2","state":"UNAVAILABLE","reason":"no such file","waiting":0,
             "rows":0,"batches":0,"requests":0,"failed":0}],
  "replicas":[{"replica":0,"model":"s","device":"cpu#0","state":"ready","restarts":0,"computing":8,
               "staged":8,"pid":10,"batches":220,"rows":1400,"busy_s":3.05},
              {"replica":1,"model":"s","device":"cpu#1","state":"ready","restarts":1,"computing":8,
               "staged":2,"pid":12,"batches":90,"rows":720,"busy_s":0.5},
              {"replica":2,"model":"wide","device":"cpu#0","state":"starting","restarts":0,
               "computing":0,"staged":0,"pid":13,"batches":0,"rows":0,"busy_s":0.0}],
  "tenants":[{"name":"alice","guaranteed":0.5,"ceiling":1.0,"waiting":9,"device_s":3.9,
              "borrowed_s":0.65,"refused":0,"p50_ms":11.25,"p99_ms":230.1},
             {"name":"bob","guaranteed":0.4,"ceiling":0.6,"waiting":3,"device_s":1.3,
              "borrowed_s":0.0,"refused":17,"p50_ms":9.5,"p99_ms":22.0}]})";

std::string draw(const TopScreen& screen = {}, const char* before = kBefore) {
  return cat("\n", join(draw_top("http://h:8000", rates_between(before, kNow), screen), "\n"),
             "\n");
}

size_t letters(const std::string& line) {
  return size_t(std::ranges::count_if(line, [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

TEST(Top, RatesAreWhatWasDoneBetweenTwoViews) {
  const Json rates = Json::parse(rates_between(kBefore, kNow));
  EXPECT_EQ(rates["seconds"], 2.0);
  const Json first = rates["replicas"][0], tenant = rates["tenants"][0];
  EXPECT_EQ(first["rows_per_s"], 400);
  EXPECT_EQ(first["batches_per_s"], 50);
  EXPECT_EQ(first["rows_per_batch"], 8);
  EXPECT_NEAR(first["busy"], 0.9, 1e-9);
  EXPECT_FALSE(first.contains("rows"));
  EXPECT_EQ(rates["models"][0]["requests_per_s"], 200);
  EXPECT_EQ(rates["models"][0]["failed_per_s"], 0.5);
  EXPECT_NEAR(tenant["share"], 0.6, 1e-9);  // 2.4 s of two devices' 4 s
  EXPECT_NEAR(tenant["borrowed"], 0.1, 1e-9);
  EXPECT_EQ(rates["tenants"][1]["refused_per_s"], 3.5);
}

TEST(Top, WhatIsNewOrCountsAnewBeganAtZero) {
  const Json rates = Json::parse(rates_between(kBefore, kNow));
  EXPECT_EQ(rates["replicas"][1]["busy"], 0.25);  // 0.75 s before, 0.5 s now
  EXPECT_EQ(rates["models"][1]["requests_per_s"], 0);
  EXPECT_EQ(rates["models"][1]["rows_per_batch"], 0);
}

TEST(Top, OneViewAloneHasNoRates) {
  const Json rates = Json::parse(rates_between(kNow, kNow));
  EXPECT_EQ(rates["replicas"][0]["rows_per_s"], 0);
  EXPECT_EQ(draw({}, kNow).substr(0, 38), "\nhttp://h:8000  ready, devices: 2\n\nrep");
}

TEST(Top, WhatIsNoViewIsRefused) {
  EXPECT_THROW(rates_between("<html>", "<html>"), Error);
  EXPECT_THROW(rates_between("{}", kNow), Error);
}

TEST(Top, PictureHasEverything) {
  EXPECT_EQ(draw(), R"(
http://h:8000  ready, devices: 2, in the last 2.0 s

replica  model  device  state     restarts  rows/s  batches/s  rows/batch  busy                computing  staged
      0  s      cpu#0   ready            0     400       50.0         8.0  90 %  [######### ]          8       8
      1  s      cpu#1   ready            1     160        5.0        32.0  25 %  [###       ]          8       2
      2  wide   cpu#0   starting         0       0          0           0   0 %  [          ]          0       0

model  version  state        waiting  requests/s  failed/s  rows/batch  reason
s            1  READY             12         200       0.5         8.0
wide         2  UNAVAILABLE        0           0         0           0  no such file

tenant  share                          guaranteed  ceiling  borrowed  waiting  refused/s  p50 ms  p99 ms
alice    60 %  [##########++        ]        50 %    100 %      10 %        9          0    11.2     230
bob      20 %  [####....    |       ]        40 %     60 %       0 %        3        3.5     9.5    22.0
# its own share  + borrowed  . guaranteed, not used  | ceiling
)");
}

TEST(Top, NarrowAndLowScreenGetsWhatFits) {
  EXPECT_EQ(draw({.columns = 80, .rows = 13}), R"(
http://h:8000  ready, devices: 2, in the last 2.0 s

replica  model  device  state     restarts  rows/s  rows/batch  busy  computing
      0  s      cpu#0   ready            0     400         8.0  90 %          8
… 2 more

model  version  state        waiting  requests/s  failed/s  rows/batch  reason
s            1  READY             12         200       0.5         8.0
wide         2  UNAVAILABLE        0           0         0           0  no such

tenant  share                          waiting  refused/s  p50 ms  p99 ms
… 2 more
# its own share  + borrowed  . guaranteed, not used  | ceiling
)");
}

TEST(Top, NoScreenIsTooSmall) {
  for (size_t rows = 0; rows < 20; ++rows) {
    for (size_t columns = 0; columns < 120; columns += 7) {
      const auto lines =
          draw_top("http://h", rates_between(kBefore, kNow), {.columns = columns, .rows = rows});
      EXPECT_LE(lines.size(), rows);
      for (const auto& line : lines) EXPECT_LE(letters(line), columns) << line;
    }
  }
}

TEST(Top, ColoursAreThereWhenAskedFor) {
  EXPECT_EQ(draw().find('\x1b'), std::string::npos);
  const std::string text = draw({.columns = 80, .colour = true});
  EXPECT_NE(text.find("\x1b[32mready\x1b[0m, devices: 2"), std::string::npos) << text;
  EXPECT_NE(text.find("[\x1b[32m##########\x1b[0m\x1b[33m++\x1b[0m        ]"), std::string::npos)
      << text;
}

TEST(Top, LostServerIsSaidAboveTheLastRates) {
  const std::string text = draw({.trouble = "nothing listens there"});
  EXPECT_TRUE(text.starts_with("\nhttp://h:8000  no answer, retrying: nothing listens there\n"));
  EXPECT_NE(text.find("90 %"), std::string::npos);
}

TEST(Top, NamesCannotSteerTheTerminal) {
  std::string now = kNow;
  now.replace(now.find("alice"), 5, "a\\u001b[2J");
  const auto lines = draw_top("http://h", rates_between(kBefore, now), {});
  EXPECT_NE(join(lines, "\n").find("a?[2J "), std::string::npos);
}

}  // namespace yoke::cli
