// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/store.h"

#include <gtest/gtest.h>

#include <thread>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::comm;
using namespace std::chrono_literals;

namespace {

// Two ends of one store.
struct Ends {
  std::shared_ptr<Store> a, b;
};

Ends memory_ends() {
  const auto store = make_memory_store();
  return {store, store};
}

Ends tcp_ends() {
  const auto server = serve_tcp_store(0, 10s);
  EXPECT_NE(server.port, 0);
  return {server.store, connect_tcp_store("127.0.0.1", server.port, 10s)};
}

class StoreContract : public testing::TestWithParam<Ends (*)()> {};

}  // namespace

TEST_P(StoreContract, BothEndsSeeWhatOneSets) {
  const auto [a, b] = GetParam()();
  const std::string value("with a \0 inside", 15);
  a->set("key", value);
  EXPECT_EQ(b->get("key", 10s), value);
  EXPECT_TRUE(b->has("key"));
  EXPECT_FALSE(b->has("other"));
}

TEST_P(StoreContract, GetWaitsForTheKey) {
  const auto ends = GetParam()();
  std::jthread late([&] { ends.b->set("late", "here"); });
  EXPECT_EQ(ends.a->get("late", 10s), "here");
}

TEST_P(StoreContract, GetNamesTheKeyAtTheDeadline) {
  const auto ends = GetParam()();
  try {
    ends.a->get("never", 50ms);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Timeout);
    EXPECT_NE(std::string(error.what()).find("'never'"), std::string::npos);
  }
}

TEST_P(StoreContract, AddCountsFromAllEnds) {
  const auto ends = GetParam()();
  {
    std::vector<std::jthread> threads;
    for (const auto& end : {ends.a, ends.b})
      threads.emplace_back([end] {
        for (int i = 0; i < 50; ++i) end->add("count", 2);
      });
  }
  EXPECT_EQ(ends.a->add("count", 0), 200);
}

INSTANTIATE_TEST_SUITE_P(Memory, StoreContract, testing::Values(&memory_ends));
INSTANTIATE_TEST_SUITE_P(Tcp, StoreContract, testing::Values(&tcp_ends));

TEST(TcpStore, APortInUseIsOneClearError) {
  const auto server = serve_tcp_store(0, 5s);
  try {
    serve_tcp_store(server.port, 5s);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Io);
    EXPECT_NE(std::string(error.what()).find("0 for any free one"), std::string::npos)
        << error.what();
  }
}

TEST(TcpStore, AnAbsentServerIsNamedWithinTheDeadline) {
  uint16_t port = 0;
  { port = serve_tcp_store(0, 5s).port; }
  try {
    connect_tcp_store("127.0.0.1", port, 500ms);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("127.0.0.1:" + std::to_string(port)),
              std::string::npos);
  }
}
