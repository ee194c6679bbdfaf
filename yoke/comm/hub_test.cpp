// SPDX-License-Identifier: Apache-2.0
// The meeting of processes, played by threads: each joins the hub on its own.
#include "yoke/comm/hub.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "yoke/comm/side_channel.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

Hello hello_of(int process, int num_processes, int num_ranks = 1) {
  return {.process = process,
          .num_processes = num_processes,
          .num_ranks = num_ranks,
          .place = {.host = "n1", .process = 100 + process, .machine = "m"},
          .job = "job 7"};
}

class HubTest : public testing::Test {
 protected:
  explicit HubTest(Duration timeout = 20s)
      : hub_({"127.0.0.1", 0}, {.num_processes = 2, .job = "job 7", .timeout = timeout}) {}

  std::shared_ptr<SideChannel> join(const Hello& hello, Duration timeout = 20s) {
    return SideChannel::join({[&] { return std::vector{hub_.address()}; }}, hello, timeout);
  }
  std::string refusal_of(const Hello& hello, Duration timeout = 5s) {
    try {
      join(hello, timeout);
    } catch (const Error& error) {
      return error.what();
    }
    return "not refused";
  }

  Hub hub_;
};

// Two processes of a world that is there.
class HubOfTwo : public HubTest {
 protected:
  void SetUp() override {
    std::jthread other([&] { channels_[1] = join(hello_of(1, 2, 2)); });
    channels_[0] = join(hello_of(0, 2));
    other.join();
    for (size_t p = 0; p < 2; ++p)
      worlds_[p] = std::make_shared<World>(channels_[p]->membership(), WorldOptions{});
    before_attach();
    for (size_t p = 0; p < 2; ++p) channels_[p]->attach(*worlds_[p]);
  }
  virtual void before_attach() {}
  void TearDown() override {
    for (const auto& channel : channels_) channel->close();
  }
  static bool soon(const std::function<bool()>& condition) {
    for (int i = 0; i < 5000 && !condition(); ++i) std::this_thread::sleep_for(1ms);
    return condition();
  }

  std::array<std::shared_ptr<SideChannel>, 2> channels_;
  std::array<std::shared_ptr<World>, 2> worlds_;
};

TEST_F(HubOfTwo, RanksAreNumberedByProcessAndThread) {
  for (const auto& world : worlds_) EXPECT_EQ(world->size(), 3);
  EXPECT_EQ(worlds_[1]->first_here(), 1);
  EXPECT_EQ(worlds_[1]->num_here(), 2);
  EXPECT_EQ(worlds_[0]->name_of(2), "rank 2 (host n1, process 101)");
}

TEST_F(HubOfTwo, OneStoreServesAll) {
  std::jthread later([&] {
    std::this_thread::sleep_for(20ms);
    channels_[1]->set("where", "here");
  });
  EXPECT_EQ(channels_[0]->get("where", 10s), "here");
  EXPECT_TRUE(channels_[1]->has("where"));
  EXPECT_FALSE(channels_[1]->has("what"));
  EXPECT_EQ(channels_[0]->add("count", 2), 2);
  EXPECT_EQ(channels_[1]->add("count", 3), 5);
  EXPECT_THROW(channels_[1]->add("where", 3), Error);
  EXPECT_THROW(channels_[0]->get("what", 10ms), Error);
}

TEST_F(HubOfTwo, TheFirstFailureIsTheSameForAll) {
  worlds_[1]->fail(2, Kind::Device, "out of memory");
  ASSERT_TRUE(soon([&] { return worlds_[0]->failed(); }));
  EXPECT_EQ(worlds_[0]->failure()->rank, 2);
  EXPECT_EQ(worlds_[0]->failure()->kind, Kind::Device);
  EXPECT_EQ(worlds_[0]->failure()->what, "out of memory");
  EXPECT_EQ(hub_.failure()->what, "out of memory");
  EXPECT_THROW(channels_[0]->get("never", 10s), Error);  // nobody waits on
}

// A rank that fails leaves as well, both perhaps before its process can tell of either.
class HubOfTwoOneFailing : public HubOfTwo {
 protected:
  void before_attach() override {
    listener_ = worlds_[0]->on_change([this] {
      if (worlds_[0]->left(2) && !worlds_[0]->failed()) too_early_ = true;
    });
    worlds_[1]->fail(2, Kind::Device, "out of memory");
    worlds_[1]->leave(2);
  }
  std::atomic<bool> too_early_{false};
  std::shared_ptr<void> listener_;
};

TEST_F(HubOfTwoOneFailing, ItsFailureIsHeardOfBeforeItsLeaving) {
  ASSERT_TRUE(soon([&] { return worlds_[0]->left(2); }));
  EXPECT_FALSE(too_early_);
  EXPECT_EQ(worlds_[0]->failure()->what, "out of memory");
}

TEST_F(HubOfTwo, WhatARankDoesAndThatItLeavesIsKnownElsewhere) {
  auto& flights = worlds_[1]->flights();
  flights.name_group(7, "world");
  flights.post(2, {.kind = "all_reduce", .group = 7, .sequence = 5, .bytes = 1024});
  ASSERT_TRUE(soon([&] { return worlds_[0]->flights().last(2).has_value(); }));
  const auto there = worlds_[0]->whereabouts(2);
  EXPECT_TRUE(there.starts_with("rank 2 (host n1, process 101): all_reduce #5 on world, 1 KiB"))
      << there;
  worlds_[0]->flights().name_group(3, "world");
  EXPECT_TRUE(worlds_[0]->has_called(2, 3, 5));
  EXPECT_FALSE(worlds_[0]->has_called(2, 3, 6));
  // The last operation arrives before the news that the rank has left.
  flights.post(2, {.kind = "barrier", .group = 7, .sequence = 6});
  worlds_[1]->leave(2);
  ASSERT_TRUE(soon([&] { return worlds_[0]->left(2); }));
  EXPECT_TRUE(worlds_[0]->has_called(2, 3, 6));
}

TEST_F(HubTest, RefusesWhatDoesNotFitTogether) {
  FrameSocket first(net::Socket::connect(hub_.address(), SteadyClock().now() + 5s));
  Writer values;
  put(values, hello_of(0, 2));
  first.put(FrameType::Hello, values);
  first.send();
  EXPECT_NE(refusal_of(hello_of(0, 2)).find("two processes have the same number"),
            std::string::npos);
  EXPECT_NE(refusal_of(hello_of(1, 3)).find("counts 3 processes, the meeting place 2"),
            std::string::npos);
  auto stranger = hello_of(1, 2);
  stranger.job = "job 8";
  // Who may only have met another job's place asks again until its time is over.
  EXPECT_NE(refusal_of(stranger, 2s).find("another job ('job 7')"), std::string::npos);
  // Somebody who speaks another language is let go, and the meeting goes on.
  auto socket = net::Socket::connect(hub_.address(), SteadyClock().now() + 5s);
  socket.write_all("GET / HTTP/1.1\r\n\r\n", SteadyClock().now() + 5s);
  std::array<char, 16> buffer;
  EXPECT_EQ(socket.read_some(buffer, SteadyClock().now() + 5s), 0u);
  join(hello_of(1, 2));
}

class HubThatTires : public HubTest {
 protected:
  HubThatTires() : HubTest(300ms) {}
};

TEST_F(HubThatTires, SaysWhoIsMissing) {
  const auto text = refusal_of(hello_of(1, 2));
  EXPECT_NE(text.find("missing: process 0; here: process 1 (host n1, process 101)"),
            std::string::npos)
      << text;
  EXPECT_EQ(refusal_of(hello_of(0, 2)), text);  // who is late hears the same
}

}  // namespace
}  // namespace yoke::comm
