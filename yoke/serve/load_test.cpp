// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <future>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/net/socket.h"

using namespace yoke;
using namespace yoke::serve;
using namespace std::chrono_literals;

namespace {

Time soon() { return SteadyClock().now() + 20s; }

// A server with a thread for each client, which answers by a function of the request's body.
class Small {
 public:
  struct Reply {
    std::string text = {};  // empty: close without a word
    Duration after = {};
  };
  using Respond = std::function<Reply(const std::string& head, const std::string& body)>;
  explicit Small(Respond respond) : respond_(std::move(respond)) {
    accepting_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        try {
          auto socket = listener_.accept(SteadyClock().now() + 20ms);
          ++num_clients_;
          clients_.emplace_back([this, socket = std::move(socket)](
                                    const std::stop_token& end) mutable { serve(socket, end); });
        } catch (const Error&) {  // nobody came
        }
      }
    });
  }
  ~Small() {
    accepting_ = {};
    clients_.clear();
  }
  const net::Address& address() const { return listener_.address(); }

  size_t num_clients() const { return num_clients_; }  // so far

  static std::string ok(const std::string& body, const char* more = "") {
    return cat("HTTP/1.1 200 OK\r\nContent-Length: ", body.size(), "\r\n", more, "\r\n", body);
  }

 private:
  void serve(net::Socket& socket, const std::stop_token& end) {
    std::string in;
    std::array<char, 4096> buffer;
    while (!end.stop_requested()) {
      try {
        const size_t head = in.find("\r\n\r\n");
        const size_t length = head == in.npos ? 0 : std::stoul(in.substr(in.find("Length: ") + 8));
        if (head != in.npos && in.size() >= head + 4 + length) {
          const Reply reply = respond_(in.substr(0, head + 2), in.substr(head + 4, length));
          in.erase(0, head + 4 + length);
          if (reply.text.empty()) return;
          std::this_thread::sleep_for(reply.after);
          socket.write_all(reply.text, soon());
          continue;
        }
        const size_t got = socket.read_some(buffer, SteadyClock().now() + 20ms);
        if (got == 0) return;
        in.append(buffer.data(), got);
      } catch (const Error& error) {
        if (error.kind() != Kind::Timeout) return;
      }
    }
  }

  const Respond respond_;
  net::Listener listener_{net::Address{"127.0.0.1", 0}};
  std::atomic<size_t> num_clients_{0};
  std::vector<std::jthread> clients_;
  std::jthread accepting_;
};

void make(uint64_t number, LoadRequest& request) {
  request = {.path = "/infer", .headers = "yoke-tenant: a\r\n", .body = std::to_string(number)};
}

}  // namespace

TEST(Load, ClosedLoopKeepsItsConnectionsAndCountsEveryAnswer) {
  Small server([](const std::string& head, const std::string& body) {
    EXPECT_NE(head.find("\r\nyoke-tenant: a\r\n"), std::string::npos);
    return Small::Reply{Small::ok("<" + body + ">"), 1ms};
  });
  std::set<uint64_t> numbers;
  const auto reports =
      run_load({.to = server.address(), .warm_up = 0ms, .length = 20s},
               {{.connections = 4,
                 .count = 200,
                 .make = make,
                 .check = [&](uint64_t number, const LoadAnswer& answer) {
                   numbers.insert(number);
                   return answer.status == 200 && answer.body == cat("<", number, ">");
                 }}});
  EXPECT_EQ(reports[0].requests, 200u);
  EXPECT_EQ(reports[0].wrong, 0u);
  EXPECT_EQ(numbers.size(), 200u);
  EXPECT_EQ(others_text(reports[0]), "none");
  EXPECT_EQ(server.num_clients(), 4u);
  EXPECT_LE(reports[0].percentile_ms(0.5), reports[0].percentile_ms(0.99));
  EXPECT_EQ(reports[0].percentile_ms(1), double(reports[0].latencies.back().count()) / 1e6);
}

TEST(Load, WrongAnswersAreCountedAsWrong) {
  Small server([](const std::string&, const std::string& body) {
    return Small::Reply{Small::ok(body == "7" ? "8" : body)};
  });
  const auto check = [](uint64_t number, const LoadAnswer& answer) {
    return answer.body == std::to_string(number);
  };
  const auto reports = run_load({.to = server.address(), .warm_up = 0ms, .length = 20s},
                                {{.count = 20, .make = make, .check = check}});
  EXPECT_EQ(reports[0].wrong, 1u);
}

TEST(Load, OpenLoopCountsFromTheScheduleThoughTheServerIsSlow) {
  Small server([](const std::string&, const std::string& body) {
    return Small::Reply{Small::ok(body), 20ms};
  });
  std::vector<Time> dues;
  const auto check = [&](uint64_t, const LoadAnswer& answer) {
    dues.push_back(answer.due);
    return true;
  };
  // 200 a second are wanted of one connection that does 50: the last waits for about a second.
  const auto reports =
      run_load({.to = server.address(), .warm_up = 0ms, .length = 20s}, {{.connections = 1,
                                                                          .rate = 200,
                                                                          .poisson = false,
                                                                          .count = 60,
                                                                          .make = make,
                                                                          .check = check}});
  EXPECT_EQ(reports[0].requests, 60u);
  EXPECT_GT(reports[0].percentile_ms(1), 850);  // 60 x 20 ms - 60 x 5 ms
  EXPECT_LT(reports[0].percentile_ms(0.01), 500);
  for (size_t i = 1; i < dues.size(); ++i) EXPECT_EQ(dues[i] - dues[i - 1], 5ms);
}

TEST(Load, PoissonArrivalsComeAtTheirRateAndByChance) {
  Small server(
      [](const std::string&, const std::string& body) { return Small::Reply{Small::ok(body)}; });
  std::vector<Time> dues;
  const auto check = [&](uint64_t, const LoadAnswer& answer) {
    dues.push_back(answer.due);
    return true;
  };
  run_load({.to = server.address(), .warm_up = 0ms, .length = 20s},
           {{.connections = 16, .rate = 2000, .count = 1000, .make = make, .check = check}});
  ASSERT_EQ(dues.size(), 1000u);
  std::ranges::sort(dues);
  std::vector<double> gaps;
  for (size_t i = 1; i < dues.size(); ++i)
    gaps.push_back(std::chrono::duration<double>(dues[i] - dues[i - 1]).count());
  const double mean = std::accumulate(gaps.begin(), gaps.end(), 0.0) / double(gaps.size());
  double square = 0;
  for (const double gap : gaps) square += (gap - mean) * (gap - mean) / double(gaps.size());
  EXPECT_NEAR(mean, 0.0005, 0.00005);
  EXPECT_NEAR(std::sqrt(square) / mean, 1, 0.15);  // as an exponential distribution has it
}

TEST(Load, FailuresAreToldByTheirKind) {
  Small server([](const std::string&, const std::string& body) {
    const int number = std::stoi(body) % 4;
    if (number == 0) return Small::Reply{};
    if (number == 1)
      return Small::Reply{"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"};
    return Small::Reply{Small::ok(body, number == 2 ? "Connection: close\r\n" : "")};
  });
  const auto reports = run_load({.to = server.address(), .warm_up = 0ms, .length = 20s},
                                {{.connections = 2, .count = 40, .make = make}});
  EXPECT_EQ(reports[0].requests, 20u);
  EXPECT_EQ(others_text(reports[0]), "broken x 10, 429 x 10");
  EXPECT_EQ(reports[0].failed(), 20u);
  EXPECT_GE(server.num_clients(), 20u);  // one that was told to close is not used again
}

TEST(Load, WhoIsNotAnsweredGivesUpAndWhoLeavesLeaves) {
  std::promise<void> over;
  Small server([all = over.get_future().share()](const std::string&, const std::string& body) {
    all.wait();
    return Small::Reply{Small::ok(body)};
  });
  const auto leaves = [](uint64_t number, LoadRequest& request) {
    make(number, request);
    request.leave_after = 5ms;
  };
  const auto reports =
      run_load({.to = server.address(), .warm_up = 0ms, .length = 20s, .patience = 60ms},
               {{.count = 2, .make = make}, {.count = 3, .make = leaves}});
  over.set_value();
  EXPECT_EQ(others_text(reports[0]), "late x 2");
  EXPECT_EQ(others_text(reports[1]), "left x 3");
  EXPECT_EQ(reports[1].failed(), 0u);
}

TEST(Load, NobodyThereEndsItAtOnce) {
  net::Address gone;
  {
    const net::Listener listener({"127.0.0.1", 0});
    gone = listener.address();
  }
  const Time begin = SteadyClock().now();
  const auto reports =
      run_load({.to = gone, .warm_up = 0ms, .length = 20s}, {{.connections = 3, .make = make}});
  EXPECT_EQ(others_text(reports[0]), "refused x 3");
  EXPECT_LT(SteadyClock().now() - begin, 10s);
}

TEST(Load, ThreadsShareTheConnectionsAndTheNumbers) {
  Small server(
      [](const std::string&, const std::string& body) { return Small::Reply{Small::ok(body)}; });
  std::mutex mutex;
  std::set<uint64_t> numbers;
  const auto check = [&](uint64_t number, const LoadAnswer& answer) {
    const std::lock_guard lock(mutex);
    return numbers.insert(number).second && answer.body == std::to_string(number);
  };
  const auto reports =
      run_load({.to = server.address(), .warm_up = 0ms, .length = 20s, .threads = 2},
               {{.connections = 5, .count = 100, .make = make, .check = check}});
  EXPECT_EQ(reports[0].requests, 100u);
  EXPECT_EQ(reports[0].wrong, 0u);
  EXPECT_TRUE(std::ranges::is_sorted(reports[0].latencies));
}

TEST(Load, PipelineHasSoManyOnTheWayAndTellsHowManyCame) {
  uint64_t made = 0, most = 0;
  std::vector<std::string> bodies;
  Small server(
      [](const std::string&, const std::string& body) { return Small::Reply{Small::ok(body)}; });
  const auto ask = [&](uint64_t count) {
    made = 0;
    bodies.clear();
    return run_pipeline(
        server.address(), count, 8, 20s,
        [&](uint64_t number, LoadRequest& request) {
          make(number, request);
          most = std::max(most, ++made - bodies.size());
        },
        [&](const LoadAnswer& answer) { bodies.emplace_back(answer.body); });
  };
  EXPECT_EQ(ask(90), 90u);
  for (size_t i = 0; i < bodies.size(); ++i) EXPECT_EQ(bodies[i], std::to_string(i));
  EXPECT_EQ(most, 8u);
  EXPECT_EQ(server.num_clients(), 1u);
}

TEST(Load, PipelineThatIsNotAnsweredEndsWithItsPatience) {
  const net::Listener silent({"127.0.0.1", 0});
  EXPECT_EQ(run_pipeline(silent.address(), 3, 8, 50ms, make, {}), 0u);
}
