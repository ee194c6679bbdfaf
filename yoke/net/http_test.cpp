// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/http.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/net/http_message.h"

using namespace yoke;
using namespace yoke::net;
using namespace std::chrono_literals;

namespace {

Time soon() { return SteadyClock().now() + 20s; }

HttpServer start(const HttpLimits& limits = {}) {
  return HttpServer(
      Listener({"127.0.0.1", 0}),
      {{"/metrics", [](const HttpRequest&) { return HttpResponse{.body = "steps 3\n"}; }},
       {"/query", [](const HttpRequest& request) { return HttpResponse{.body = request.query}; }},
       {"/who",
        [](const HttpRequest& request) { return HttpResponse{.body = request.authorization}; }},
       {"/large",
        [](const HttpRequest&) { return HttpResponse{.body = std::string(16 << 20, 'x')}; }},
       {"/broken",
        [](const HttpRequest&) -> HttpResponse { throw std::runtime_error("no data"); }}},
      limits);
}

std::string read_to_end(Socket& socket) {
  std::string text;
  std::array<char, 65536> buffer;
  while (const size_t got = socket.read_some(buffer, soon())) text.append(buffer.data(), got);
  return text;
}

// The whole answer to raw bytes, until the server closes.
std::string answer(const HttpServer& server, const std::string& request) {
  Socket socket = Socket::connect(server.address(), soon());
  socket.write_all(request, soon());
  return read_to_end(socket);
}

std::string get(const std::string& path) {
  return "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
}

std::string status(const std::string& answer) { return answer.substr(9, 3); }

}  // namespace

TEST(Http, GetGivesTheHandlersBodyWithItsLength) {
  const HttpServer server = start();
  EXPECT_EQ(answer(server, get("/metrics")),
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 8\r\n"
            "Connection: close\r\n\r\nsteps 3\n");
}

TEST(Http, AuthorizationComesAsItWasSent) {
  const HttpServer server = start();
  const std::string said =
      answer(server,
             "GET /who HTTP/1.1\r\nHost: x\r\nauthorization:  Bearer yk-Ab:c \r\n"
             "Connection: close\r\n\r\n");
  EXPECT_TRUE(said.ends_with("\r\n\r\nBearer yk-Ab:c")) << said;
}

TEST(Http, AnswerEndsWithoutWaitingForTheClientsEnd) {
  const HttpServer server = start();
  const Time begin = SteadyClock().now();
  for (int i = 0; i < 5; ++i) answer(server, get("/metrics"));
  EXPECT_LT(SteadyClock().now() - begin, 4s);  // the server lingers a second for each
}

TEST(Http, HeadGivesTheLengthWithoutTheBody) {
  const HttpServer server = start();
  const auto text =
      answer(server, "HEAD /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_NE(text.find("Content-Length: 8\r\n"), std::string::npos);
  EXPECT_TRUE(text.ends_with("\r\n\r\n")) << text;
}

TEST(Http, QueryReachesTheHandler) {
  const HttpServer server = start();
  EXPECT_TRUE(answer(server, get("/query?a=1&b[]=2?")).ends_with("\r\n\r\na=1&b[]=2?"));
}

TEST(Http, WrongRequestsGetTheirStatus) {
  const HttpServer server = start();
  EXPECT_EQ(status(answer(server, get("/nothing"))), "404");
  const auto post = answer(server, "POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(status(post), "405");
  EXPECT_NE(post.find("Allow: GET, HEAD\r\n"), std::string::npos);
  EXPECT_EQ(status(answer(server, "nonsense\r\n\r\n")), "400");
  EXPECT_EQ(status(answer(server, "GET /metrics HTTP/2.0\r\n\r\n")), "505");
}

TEST(Http, HandlerThatThrowsIsA500WithItsMessage) {
  const HttpServer server = start();
  const auto text = answer(server, get("/broken"));
  EXPECT_EQ(status(text), "500");
  EXPECT_TRUE(text.ends_with("no data\n"));
  EXPECT_EQ(status(answer(server, get("/metrics"))), "200");
}

TEST(Http, HeaderOverTheLimitIs431) {
  const HttpServer server = start({.max_header_bytes = 1024});
  EXPECT_EQ(status(answer(server, "GET /metrics HTTP/1.1\r\nHost: " + std::string(100'000, 'a'))),
            "431");
  const auto padded = [](size_t size) {
    std::string text = get("/metrics");
    text.insert(text.size() - 2, "X: " + std::string(size - text.size() - 5, 'a') + "\r\n");
    return text;
  };
  EXPECT_EQ(status(answer(server, padded(1024))), "200");
  EXPECT_EQ(status(answer(server, padded(1025))), "431");
}

TEST(Http, ConnectionIsKeptForFurtherAndPipelinedRequests) {
  const HttpServer server = start();
  Socket socket = Socket::connect(server.address(), soon());
  const std::string first = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
  socket.write_all(first, soon());
  std::string text(serialize({.body = "steps 3\n"}, true, false).size(), ' ');
  socket.read_all(text, soon());
  EXPECT_TRUE(text.ends_with("Connection: keep-alive\r\n\r\nsteps 3\n")) << text;
  socket.write_all(first + first + get("/query?last"), soon());
  const std::string rest = read_to_end(socket);
  EXPECT_TRUE(rest.starts_with(text + text)) << rest;
  EXPECT_TRUE(rest.ends_with("\r\n\r\nlast")) << rest;
}

TEST(Http, RequestInPiecesIsPutTogether) {
  const HttpServer server = start();
  Socket socket = Socket::connect(server.address(), soon());
  for (const char c : get("/metrics")) socket.write_all({&c, 1}, soon());
  EXPECT_EQ(status(read_to_end(socket)), "200");
}

TEST(Http, ClientThatStopsInTheMiddleDelaysNobody) {
  const HttpServer server = start();
  Socket slow = Socket::connect(server.address(), soon());
  slow.write_all("GET /metr", soon());
  EXPECT_EQ(status(answer(server, get("/metrics"))), "200");
  slow.write_all("ics HTTP/1.0\r\n\r\n", soon());
  EXPECT_EQ(status(read_to_end(slow)), "200");
}

TEST(Http, SilentClientIsDroppedAtItsTime) {
  const HttpServer server = start({.timeout = 50ms});
  Socket silent = Socket::connect(server.address(), soon());
  EXPECT_EQ(read_to_end(silent), "");
}

TEST(Http, ClientThatDoesNotReadDelaysNobody) {
  const HttpServer server = start();
  Socket lazy = Socket::connect(server.address(), soon());
  lazy.write_all(get("/large"), soon());
  EXPECT_EQ(status(answer(server, get("/metrics"))), "200");
  const std::string large = read_to_end(lazy);
  EXPECT_EQ(large.substr(large.find("\r\n\r\n") + 4), std::string(16 << 20, 'x'));
}

TEST(Http, FurtherClientsWaitUntilAConnectionIsFree) {
  const HttpServer server = start({.max_connections = 1});
  std::optional<Socket> first = Socket::connect(server.address(), soon());
  first->write_all("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", soon());
  std::array<char, 1024> buffer;
  ASSERT_GT(first->read_some(buffer, soon()), 0u);
  Socket second = Socket::connect(server.address(), soon());
  second.write_all(get("/metrics"), soon());
  EXPECT_THROW(second.read_some(buffer, SteadyClock().now() + 50ms), Error);
  first.reset();
  EXPECT_EQ(status(read_to_end(second)), "200");
}

TEST(Http, StopsAtOnceWithClientsConnected) {
  std::optional<Socket> idle;
  const Time start_time = SteadyClock().now();
  {
    const HttpServer server = start({.timeout = 60s});
    idle = Socket::connect(server.address(), soon());
    idle->write_all("GET /", soon());
    EXPECT_EQ(status(answer(server, get("/metrics"))), "200");
  }
  EXPECT_LT(SteadyClock().now() - start_time, 20s);
  std::array<char, 16> buffer;
  try {
    EXPECT_EQ(idle->read_some(buffer, soon()), 0u);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Io);  // a reset is an end as well
  }
}

TEST(Http, CurlUnderstandsIt) {
  const HttpServer server = start();
  const std::string url = "http://" + to_text(server.address());
  try {
    const auto result = run_process({"curl", "--silent", "--noproxy", "*", "--max-time", "20",
                                     "--write-out", "%{http_code} %{num_connects}\n",
                                     url + "/metrics", url + "/metrics", url + "/nothing"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "steps 3\n200 1\nsteps 3\n200 0\n404 Not Found\n404 0\n");
    const auto head =
        run_process({"curl", "--silent", "--noproxy", "*", "--head", url + "/metrics"});
    EXPECT_NE(head.out.find("Content-Length: 8"), std::string::npos);
  } catch (const Error& error) {
    GTEST_SKIP() << "no curl here: " << error.what();
  }
}

TEST(HttpMessage, HeadEndsAtTheBlankLine) {
  EXPECT_EQ(head_size("GET / HTTP/1.1\r\nHost: x\r\n\r\nrest"), 27u);
  EXPECT_EQ(head_size("GET / HTTP/1.1\nHost: x\n\n"), 24u);
  EXPECT_EQ(head_size("GET / HTTP/1.1\r\nHost: x\r\n"), std::nullopt);
}

TEST(HttpMessage, VersionAndConnectionFieldDecideWhetherItIsKept) {
  const auto keep = [](const std::string& head) { return parse_request(head).keep_alive; };
  EXPECT_TRUE(keep("GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
  EXPECT_FALSE(keep("GET / HTTP/1.1\r\nHost: x\r\nCONNECTION: Close\r\n\r\n"));
  EXPECT_FALSE(keep("GET / HTTP/1.0\r\n\r\n"));
  EXPECT_TRUE(keep("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
}

TEST(HttpMessage, DoubtfulRequestsAreRefused) {
  const auto error = [](const std::string& head) { return parse_request(head).error; };
  EXPECT_EQ(error("\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"), 0);
  EXPECT_EQ(error("GET / HTTP/1.1\r\n\r\n"), 400) << "no Host";
  EXPECT_EQ(error("GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"), 400) << "two Hosts";
  EXPECT_EQ(error("GET / HTTP/1.1\r\nHost : x\r\n\r\n"), 400) << "blank before the colon";
  EXPECT_EQ(error("GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n"), 400);
  EXPECT_EQ(error("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"), 400) << "a body";
  EXPECT_EQ(error("GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
  EXPECT_EQ(error("GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n"), 400) << "a proxy's request";
  EXPECT_EQ(error("GET  / HTTP/1.1\r\nHost: x\r\n\r\n"), 400) << "two blanks";
  EXPECT_EQ(error("GET / HTTP/1.1 \r\nHost: x\r\n\r\n"), 400) << "a blank at the end";
  EXPECT_EQ(error(std::string("GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 29)), 400) << "a zero byte";
  EXPECT_EQ(error("GET / FTP/1.1\r\nHost: x\r\n\r\n"), 400);
  EXPECT_EQ(error("DELETE / HTTP/1.1\r\nHost: x\r\n\r\n"), 405);
}
