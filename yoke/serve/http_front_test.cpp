// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/http_front.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/net/socket.h"
#include "yoke/serve/stand_in.h"

namespace yoke::serve {
namespace {

using std::chrono::seconds;

Time soon() { return SteadyClock().now() + seconds(30); }

struct Server {
  explicit Server(const std::string& path, const std::string& devices = "cpu:4",
                  HttpOptions options = {}, std::vector<TenantConfig> tenants = {})
      : service({.models = {{.name = "m", .path = path, .devices = devices, .batch = 1}},
                 .tenants = std::move(tenants)},
                {.workers = {.open = open_stand_in}, .slab_bytes = 4 << 20},
                observe::Log({.level = observe::Level::Off, .other_ranks = observe::Level::Off}),
                metrics),
        front(service, options) {
    service.pool().wait_ready(seconds(30));
  }
  net::Socket connect() const {
    return net::Socket::connect(net::parse_address(front.address()), soon());
  }
  observe::Registry metrics;
  Service service;
  HttpFront front;
};

std::string infer(float value, const std::string& more = "") {
  const std::string body =
      cat("{\"inputs\":[{\"name\":\"x\",\"shape\":[1,4],\"datatype\":\"FP32\",\"data\":[", value,
          ",0,0,0]}]}");
  return cat("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: ", body.size(), "\r\n",
             more, "\r\n", body);
}

// Reads until the text has come so many times, or the other end has closed.
std::string read_until(net::Socket& socket, const std::string& text, size_t times) {
  std::string all;
  for (;;) {
    size_t found = 0;
    for (size_t at = all.find(text); at != all.npos; at = all.find(text, at + 1)) ++found;
    if (found >= times) return all;
    char piece[4096];
    const size_t bytes = socket.read_some(piece, soon());
    if (bytes == 0) return all;
    all.append(piece, bytes);
  }
}

TEST(HttpFront, AnswersAPipelinedConnectionInOrder) {
  const Server server("stand-in:ms=0,jitter_ms=6");
  auto socket = server.connect();
  std::string all;
  for (int i = 1; i <= 100; ++i) all += infer(i % 10 == 3 ? -1.0f : float(i));  // some fail
  socket.write_all(all, soon());
  const std::string answers = read_until(socket, "]}]}", 90);
  size_t at = 0;
  for (int i = 1; i <= 100; ++i) {
    const std::string wanted =
        i % 10 == 3 ? "HTTP/1.1 500 " : cat("\"data\":[", 2 * i, ".0,0.0,0.0,0.0]");
    at = answers.find(wanted, at);
    ASSERT_NE(at, answers.npos) << i;
    ++at;
  }
}

TEST(HttpFront, TakesABodyInSmallPiecesAndInvitesThoseWhoAsk) {
  const Server server("stand-in:");
  auto socket = server.connect();
  const std::string request = infer(3, "Expect: 100-continue\r\n");
  const size_t head = request.find("\r\n\r\n") + 4;
  socket.write_all(request.substr(0, head), soon());
  EXPECT_EQ(read_until(socket, "\r\n\r\n", 1), "HTTP/1.1 100 Continue\r\n\r\n");
  for (const char byte : request.substr(head)) socket.write_all({&byte, 1}, soon());
  EXPECT_NE(read_until(socket, "]}]}", 1).find("[6.0,"), std::string::npos);
}

TEST(HttpFront, CancelsWhatAClientThatLeftAskedFor) {
  const Server server("stand-in:ms=300", "cpu:1");
  for (const char* more : {"", "Connection: close\r\n"}) {
    auto socket = std::make_optional(server.connect());
    for (int i = 0; i < 5; ++i) socket->write_all(infer(1, more), soon());
    auto& pool = const_cast<Server&>(server).service.pool();
    while (pool.view().tenants[0].waiting == 0) std::this_thread::yield();
    const Time begun = SteadyClock().now();
    socket.reset();
    while (pool.view().tenants[0].waiting > 0 && SteadyClock().now() < soon())
      std::this_thread::yield();
    EXPECT_LT(SteadyClock().now() - begun, std::chrono::milliseconds(250)) << more;
  }
}

TEST(HttpFront, TakesAClientThatSendsNoMoreForGone) {
  const Server server("stand-in:ms=300", "cpu:1");
  auto socket = server.connect();
  socket.write_all(infer(1), soon());
  auto& pool = const_cast<Server&>(server).service.pool();
  while (pool.view().tenants[0].waiting == 0) std::this_thread::yield();
  socket.finish_writing();
  EXPECT_EQ(read_until(socket, "more", 1).substr(0, 13), "HTTP/1.1 499 ");  // and the end
  EXPECT_EQ(pool.find("m")->stats.success.count, 0u);
  EXPECT_EQ(pool.find("m")->stats.fail.count, 1u);
}

TEST(HttpFront, RefusesWhatProxiesReadDifferently) {
  const Server server("stand-in:");
  const auto status = [&](const std::string& request) {
    auto socket = server.connect();
    socket.write_all(request, soon());
    return read_until(socket, "\r\n", 1).substr(9, 3);
  };
  EXPECT_EQ(status("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
                   "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            "400");
  EXPECT_EQ(status("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n"
                   "Transfer-Encoding: xchunked\r\n\r\n"),
            "400");
  EXPECT_EQ(status("GET /v2/models/z?x=://h/v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"), "404");
  EXPECT_EQ(status("GET /v2/health/live HTTP/1.1\r\nHost: a\r\nx: " + std::string(20000, 'y')),
            "431");
  EXPECT_EQ(
      status("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
             "1;" +
             std::string(40000, 'y')),
      "400");
}

TEST(HttpFront, LetsQuietClientsMakeRoomForOthers) {
  const Server server("stand-in:", "cpu:1",
                      {.max_connections = 3, .idle = std::chrono::milliseconds(200)});
  std::vector<net::Socket> quiet;
  for (int i = 0; i < 4; ++i) quiet.push_back(server.connect());
  auto socket = server.connect();
  socket.write_all(infer(2), soon());
  EXPECT_NE(read_until(socket, "]}]}", 1).find("[4.0,"), std::string::npos);
}

}  // namespace
}  // namespace yoke::serve
