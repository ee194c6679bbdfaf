// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "yoke/net/address.h"
#include "yoke/serve/grpc_front.h"
#include "yoke/serve/grpc_load.h"
#include "yoke/serve/load_wire.h"
#include "yoke/serve/stand_in.h"

using namespace yoke;
using namespace yoke::serve;
using namespace std::chrono_literals;

namespace {

struct Slow {
  explicit Slow(const std::string& path)
      : service({.models = {{.name = "m", .path = path, .devices = "cpu", .batch = 1}},
                 .tenants = {{.name = "default"}}},
                {.workers = {.open = open_stand_in}, .slab_bytes = 1 << 22, .stuck_floor = 20s},
                observe::Log({.level = observe::Level::Off}), metrics) {
    service.pool().wait_ready(20s);
    front = std::make_unique<GrpcFront>(service, GrpcOptions{.address = "127.0.0.1:0"});
  }
  LoadOptions options() const {
    return {.to = net::parse_address(front->address()), .warm_up = 0ms, .length = 60s};
  }
  observe::Registry metrics;
  Service service;
  std::unique_ptr<GrpcFront> front;
};

void make(uint64_t number, LoadRequest& request) {
  Question question{.model = "m"};
  fill(question, number, {1, 4});
  request.body = grpc_question(question);
}

bool doubled(uint64_t number, const LoadAnswer& answer) {
  Question question;
  fill(question, number, {1, 4});
  std::vector<float> values(4);
  return answer.status == 200 && grpc_values(answer.body, values) &&
         std::ranges::equal(values, question.values, {}, {}, [](float x) { return 2 * x; });
}

}  // namespace

TEST(GrpcLoad, ClosedLoopCountsEveryAnswer) {
  Slow server("stand-in:ms=1");
  std::set<uint64_t> numbers;
  const auto check = [&](uint64_t number, const LoadAnswer& answer) {
    return numbers.insert(number).second && doubled(number, answer);
  };
  const auto reports = run_grpc_load(
      server.options(), {{.connections = 4, .count = 100, .make = make, .check = check}});
  EXPECT_EQ(reports[0].requests, 100u);
  EXPECT_EQ(reports[0].wrong, 0u);
  EXPECT_EQ(numbers.size(), 100u);
  EXPECT_EQ(others_text(reports[0]), "none");
}

TEST(GrpcLoad, OpenLoopCountsFromTheScheduleThoughTheServerIsSlow) {
  Slow server("stand-in:ms=20");
  std::vector<Time> dues;
  const auto check = [&](uint64_t number, const LoadAnswer& answer) {
    dues.push_back(answer.due);
    return doubled(number, answer);
  };
  // 200 a second are wanted of one connection that does 50: the last waits for about a second.
  const auto reports = run_grpc_load(server.options(), {{.connections = 1,
                                                         .rate = 200,
                                                         .poisson = false,
                                                         .count = 60,
                                                         .make = make,
                                                         .check = check}});
  EXPECT_EQ(reports[0].requests, 60u);
  EXPECT_EQ(reports[0].wrong, 0u);
  EXPECT_GT(reports[0].percentile_ms(1), 850);  // 60 x 20 ms - 60 x 5 ms
  for (size_t i = 1; i < dues.size(); ++i) EXPECT_EQ(dues[i] - dues[i - 1], 5ms);
}

TEST(GrpcLoad, WhatIsNotAnsweredInTimeIsLate) {
  Slow server("stand-in:ms=300");
  auto options = server.options();
  options.length = 100ms;
  options.patience = 500ms;
  // Two calls fit, the other ones that were due wait for the only connection.
  const auto reports = run_grpc_load(
      options, {{.connections = 1, .rate = 100, .poisson = false, .make = make, .check = {}}});
  EXPECT_GE(reports[0].others.at(kLate), 1u);
  EXPECT_EQ(reports[0].requests + reports[0].failed(), 9u);  // due after 10, 20, … 90 ms
}

TEST(GrpcLoad, WhatAUserThrowsEndsIt) {
  Slow server("stand-in:ms=1");
  const auto fails_at = [](uint64_t last) {
    return [last](uint64_t number, LoadRequest& request) {
      if (number == last) fail(Kind::Usage, "no more");
      make(number, request);
    };
  };
  for (const uint64_t last : {0, 5})
    for (const double rate : {0, 1000})
      EXPECT_THROW(run_grpc_load(server.options(),
                                 {{.connections = 2, .rate = rate, .make = fails_at(last)}}),
                   Error);
}
