// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <resolv.h>
#include <sys/socket.h>

#include <csignal>
#include <thread>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::net;
using namespace std::chrono_literals;

namespace {

const Address kLoopback{"127.0.0.1", 0};

Time in(Duration duration) { return SteadyClock().now() + duration; }

template <typename Function>
std::pair<Kind, std::string> failure(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  return {Kind::Internal, "nothing failed"};
}

struct Pair {
  Listener listener{kLoopback};
  Socket client = Socket::connect(listener.address(), in(10s));
  Socket server = listener.accept(in(10s));
};

}  // namespace

TEST(Address, TextSurvivesTheRoundTrip) {
  EXPECT_EQ(parse_address("n1:8080"), (Address{"n1", 8080}));
  EXPECT_EQ(parse_address("[::1]:80"), (Address{"::1", 80}));
  EXPECT_EQ(parse_address(":0"), (Address{"", 0}));
  for (const char* text : {"127.0.0.1:0", "[fe80::1]:65535", ":9090", "host-1.local:1"})
    EXPECT_EQ(to_text(parse_address(text)), text);
}

TEST(Address, BadTextIsRefusedWithTheNextStep) {
  EXPECT_EQ(
      failure([] { parse_address("n1"); }),
      std::pair(Kind::Usage, std::string("address 'n1': the port is missing; write host:port, "
                                         "as in 127.0.0.1:8080")));
  EXPECT_EQ(failure([] { parse_address("n1:70000"); }).second,
            "address 'n1:70000': got port '70000', wanted 0 to 65535; write host:port, as in "
            "127.0.0.1:8080");
  for (const char* text : {"", ":", "n1:", "n1:x", "n1:-1", "n1:-0", "n1:+1", "::1:80", "[::1]",
                           "[::1", "[n1]:80", "a b:80", "http://n1:80", "n1:99999999999999999999"})
    EXPECT_EQ(failure([&] { parse_address(text); }).first, Kind::Usage) << text;
}

TEST(Socket, BytesArriveBothWays) {
  Pair pair;
  EXPECT_NE(pair.listener.address().port, 0);
  pair.client.write_all("ping", in(10s));
  std::string got(4, ' ');
  pair.server.read_all(got, in(10s));
  EXPECT_EQ(got, "ping");
  pair.server.write_all("pong", in(10s));
  pair.client.read_all(got, in(10s));
  EXPECT_EQ(got, "pong");
}

TEST(Socket, NamesAndIpv6AreResolved) {
  Listener named({"localhost", 0});
  Socket::connect({"localhost", named.address().port}, in(10s));
  named.accept(in(10s));
  try {
    Listener v6({"::1", 0});
    const Socket client = Socket::connect(v6.address(), in(10s));
    EXPECT_TRUE(client.peer().starts_with("[::1]:")) << client.peer();
  } catch (const Error& error) {
    GTEST_SKIP() << "no IPv6 here: " << error.what();
  }
}

TEST(Socket, LargeMessagesPassWhileThePeerReads) {
  Pair pair;
  const std::string sent(8 << 20, 'x');
  std::string got(sent.size(), ' ');
  std::jthread reader([&] { pair.server.read_all(got, in(60s)); });
  pair.client.write_all(sent, in(60s));
  reader.join();
  EXPECT_EQ(got, sent);
}

TEST(Socket, EndOfThePeerIsZeroBytesAndEarlyEndAnError) {
  Pair pair;
  pair.client.write_all("abc", in(10s));
  pair.client.finish_writing();
  std::string got(5, ' ');
  const auto [kind, text] = failure([&] { pair.server.read_all(got, in(10s)); });
  EXPECT_EQ(kind, Kind::Io);
  EXPECT_EQ(text, pair.server.peer() + " closed the connection after 3 of 5 bytes");
  EXPECT_EQ(pair.server.read_some(got, in(10s)), 0u);
  pair.server.write_all("still open", in(10s));
  std::string back(10, ' ');
  pair.client.read_all(back, in(10s));
  EXPECT_EQ(back, "still open");
}

TEST(Socket, EveryWaitEndsAtItsDeadline) {
  Pair pair;
  std::array<char, 8> buffer;
  const Time start = SteadyClock().now();
  EXPECT_EQ(
      failure([&] { pair.server.read_some(buffer, start + 20ms); }),
      std::pair(Kind::Timeout, "nothing came from " + pair.server.peer() + " before the deadline"));
  EXPECT_GE(SteadyClock().now(), start + 20ms);
  EXPECT_EQ(failure([&] { pair.listener.accept(in(20ms)); }).first, Kind::Timeout);
  const std::string large(64 << 20, 'x');  // more than the buffers of a connection hold
  EXPECT_EQ(failure([&] { pair.client.write_all(large, in(20ms)); }).first, Kind::Timeout);
  EXPECT_LT(SteadyClock().now() - start, 30s);
}

TEST(Socket, DeadlineInThePastStillTakesWhatIsThere) {
  Pair pair;
  pair.client.write_all("x", in(10s));
  std::array<char, 1> one;
  pair.server.read_all(one, in(10s));
  pair.client.write_all("y", in(10s));
  while (!pair.server.try_read(one)) std::this_thread::yield();
  EXPECT_EQ(one[0], 'y');
  EXPECT_EQ(failure([&] { pair.server.read_all(one, in(-1s)); }).first, Kind::Timeout);
}

TEST(Socket, PortInUseSaysWhatToDo) {
  const Listener first(kLoopback);
  const auto [kind, text] = failure([&] { Listener second(first.address()); });
  EXPECT_EQ(kind, Kind::Io);
  EXPECT_EQ(text, "cannot listen on " + to_text(first.address()) +
                      ": the port is in use; choose another port, or 0 to let the system choose");
}

TEST(Socket, AddressOfAnotherHostCannotBeListenedOn) {
  const auto [kind, text] = failure([] { Listener({"192.0.2.1", 0}); });
  EXPECT_EQ(kind, Kind::Io);
  EXPECT_NE(text.find("that is no address of this host"), std::string::npos) << text;
}

TEST(Socket, RefusedConnectionSaysWhatToDo) {
  const Address gone = Listener(kLoopback).address();
  const auto [kind, text] = failure([&] { Socket::connect(gone, in(10s)); });
  EXPECT_EQ(kind, Kind::Io);
  EXPECT_EQ(text, "cannot connect to " + to_text(gone) +
                      ": Connection refused; nothing listens there, start the server first");
  EXPECT_EQ(failure([] { Socket::connect({"", 80}, in(1s)); }).first, Kind::Usage);
}

TEST(Socket, NameThatCannotBeIsAnError) {
  const std::string label(100, 'a');  // longer than a name's part may be: no server is asked
  const auto [kind, text] = failure([&] { Socket::connect({label + ".invalid", 80}, in(10s)); });
  EXPECT_EQ(kind, Kind::Io);
  EXPECT_NE(text.find("cannot find host 'aaa"), std::string::npos) << text;
}

TEST(Socket, NameServerThatIsSilentIsLeftAtTheDeadline) {
  const Descriptor silent(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{
      .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  ASSERT_EQ(::bind(silent.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  socklen_t size = sizeof at;
  ASSERT_EQ(::getsockname(silent.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
  // The resolver's settings belong to the thread: no other test sees these.
  std::jthread([&] {
    ASSERT_EQ(::res_init(), 0);
    _res.nscount = 1;
    _res.nsaddr_list[0] = at;
    const Time start = SteadyClock().now();
    const auto [kind, text] = failure([] { Socket::connect({"nobody.invalid.", 80}, in(1s)); });
    EXPECT_TRUE(kind == Kind::Timeout || kind == Kind::Io) << text;
    EXPECT_LT(SteadyClock().now() - start, 4s);  // by itself the resolver takes ten
  }).join();
}

TEST(Socket, PeerThatHasGoneIsAnErrorAndNoSignal) {
  Pair pair;
  pair.server = Socket(Descriptor(), "closed");
  const auto [kind, text] = failure([&] {
    const Time deadline = in(10s);
    while (SteadyClock().now() < deadline) pair.client.write_all("x", deadline);
  });
  EXPECT_EQ(kind, Kind::Io);
  EXPECT_NE(text.find("cannot write to"), std::string::npos) << text;
}

TEST(Socket, InterruptedWaitGoesOn) {
  struct sigaction quiet {};
  quiet.sa_handler = [](int) {};  // without SA_RESTART: poll and read return EINTR
  struct sigaction before {};
  ::sigaction(SIGUSR1, &quiet, &before);
  Pair pair;
  std::string got(1, ' ');
  std::atomic<bool> reading{false};
  {
    std::jthread reader([&] {
      reading = true;
      pair.server.read_all(got, in(60s));
    });
    while (!reading) std::this_thread::yield();
    for (int i = 0; i < 200; ++i) {
      ::pthread_kill(reader.native_handle(), SIGUSR1);
      std::this_thread::yield();
    }
    pair.client.write_all("z", in(10s));
  }
  ::sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(got, "z");
}

TEST(Socket, DescriptorsAreNotInherited) {
  Pair pair;
  for (const int fd : {pair.listener.fd(), pair.client.fd(), pair.server.fd()})
    EXPECT_TRUE(::fcntl(fd, F_GETFD) & FD_CLOEXEC);
}
