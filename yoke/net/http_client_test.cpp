// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/http_client.h"

#include <gtest/gtest.h>

#include <thread>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::net;
using namespace std::chrono_literals;

namespace {

Time soon() { return SteadyClock().now() + 20s; }

std::string url_of(const Address& address) { return "http://" + to_text(address); }

// A server of one answer, whatever it is asked; it closes when the text is out.
class OneAnswer {
 public:
  explicit OneAnswer(std::string text) : listener_({"127.0.0.1", 0}) {
    thread_ = std::jthread([this, text = std::move(text)] {
      try {
        Socket socket = listener_.accept(soon());
        std::array<char, 4096> buffer;
        while (asked_.find("\r\n\r\n") == asked_.npos)
          asked_.append(buffer.data(), socket.read_some(buffer, soon()));
        socket.write_all(text, soon());
      } catch (const Error&) {  // the client has read enough
      }
    });
  }
  std::string url() const { return url_of(listener_.address()); }
  HttpResponse get(size_t max_bytes = 1 << 20) { return http_get(url(), {}, soon(), max_bytes); }
  // What the one who asked sent.
  std::string asked() {
    if (thread_.joinable()) thread_.join();
    return asked_;
  }

 private:
  Listener listener_;
  std::string asked_;
  std::jthread thread_;
};

// The text of the error of one kind.
template <typename Ask>
std::string refused(Kind kind, Ask ask) {
  try {
    ask();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

std::string refused_answer(const std::string& text, size_t max_bytes = 1 << 20) {
  OneAnswer server(text);
  return refused(Kind::Io, [&] { server.get(max_bytes); });
}

}  // namespace

TEST(HttpClient, GetsWhatAServerGives) {
  const HttpServer server(Listener({"127.0.0.1", 0}),
                          {{"/a", [](const HttpRequest& request) {
                              return HttpResponse{.content_type = "text/x", .body = request.query};
                            }}});
  const auto answer = http_get(url_of(server.address()) + "/a?b=c#d", {}, soon());
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.content_type, "text/x");
  EXPECT_EQ(answer.body, "b=c");
  const auto missing = http_get(to_text(server.address()), {}, soon());
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(missing.body, "404 Not Found\n");
}

TEST(HttpClient, SendsItsHeadersAndWhomItAsks) {
  OneAnswer server("HTTP/1.1 204 No Content\r\n\r\n");
  EXPECT_EQ(http_get(server.url() + "/v2/x", {{"Authorization", "Bearer k 1"}}, soon()).status,
            204);
  EXPECT_EQ(server.asked(), "GET /v2/x HTTP/1.1\r\nHost: " + server.url().substr(7) +
                                "\r\nConnection: close\r\nAuthorization: Bearer k 1\r\n\r\n");
}

TEST(HttpClient, BodyEndsAtItsLengthAtTheLastChunkOrAtTheEnd) {
  const std::string ok = "HTTP/1.1 200 OK\r\n";
  EXPECT_EQ(OneAnswer(ok + "content-LENGTH:\t3 \r\n\r\nabcdef").get().body, "abc");
  EXPECT_EQ(OneAnswer(ok + "Content-Length: 0\r\n\r\n").get().body, "");
  EXPECT_EQ(OneAnswer(ok + "Transfer-Encoding: Chunked\r\n\r\n"
                           "3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\nmore")
                .get()
                .body,
            "abc0123456789");
  EXPECT_EQ(OneAnswer(ok + "\r\nall\nof it").get().body, "all\nof it");
  EXPECT_EQ(OneAnswer("HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + ok + "\r\nlate").get().body,
            "late");
}

TEST(HttpClient, AnswerThatIsNotWholeIsRefused) {
  const std::string ok = "HTTP/1.1 200 OK\r\n", chunked = ok + "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_TRUE(refused_answer(ok + "Content-Length: 10\r\n\r\nabc").ends_with("3 of 10 bytes"));
  EXPECT_TRUE(refused_answer(ok + "Content-Len").ends_with("it ended before its body"));
  EXPECT_TRUE(refused_answer(chunked + "5\r\nabc").ends_with("3 of 5 bytes"));
  EXPECT_TRUE(refused_answer(chunked + "3\r\nabc\r\n").ends_with("it ended before its body"));
  EXPECT_TRUE(refused_answer(chunked + "3\r\nabcd\r\n").ends_with("longer than its size"));
  EXPECT_TRUE(refused_answer(chunked + "-1\r\n").ends_with("has the size '-1'"));
  EXPECT_TRUE(refused_answer(ok + "Content-Length: -1\r\n\r\n").ends_with("length is '-1'"));
  EXPECT_TRUE(refused_answer(ok + "Transfer-Encoding: gzip\r\n\r\n").ends_with("as 'gzip'"));
  EXPECT_NE(refused_answer("SSH-2.0-x\r\n\r\n").find("does not begin as HTTP"), std::string::npos);
}

TEST(HttpClient, AnswerThatIsTooLargeIsRefused) {
  const std::string ok = "HTTP/1.1 200 OK\r\n", many(1 << 17, 'x');
  const auto too_large = [&](const std::string& text) {
    EXPECT_TRUE(refused_answer(ok + text, 1 << 16).ends_with("larger than is taken here")) << text;
  };
  too_large("Content-Length: 1000000000000\r\n\r\n");
  too_large("Transfer-Encoding: chunked\r\n\r\nfffffffffffffff0\r\n");
  too_large("\r\n" + many);
  EXPECT_TRUE(refused_answer(ok + many).ends_with("a line of it is too long"));
}

TEST(HttpClient, ServerThatSaysNothingIsLeftAtTheDeadline) {
  const Listener listener({"127.0.0.1", 0});  // nobody accepts
  refused(Kind::Timeout,
          [&] { http_get(url_of(listener.address()), {}, SteadyClock().now() + 20ms); });
}

TEST(HttpClient, WhatCannotBeSentIsAMistakeOfTheUser) {
  const auto usage = [](const std::string& url, const std::string& value = "") {
    return refused(Kind::Usage, [&] { http_get(url, {{"yoke-key", value}}, soon()); });
  };
  EXPECT_NE(usage("ftp://h/").find("wanted http://HOST:PORT/PATH"), std::string::npos);
  EXPECT_NE(usage("http://h:1/a b").find("wanted http://HOST:PORT/PATH"), std::string::npos);
  EXPECT_NE(usage("http://h:99999").find("wanted 0 to 65535"), std::string::npos);
  EXPECT_NE(usage("http:///v2").find("needs a host"), std::string::npos);
  EXPECT_NE(usage("http://127.0.0.1:1", "a\r\nb: c").find("'yoke-key'"), std::string::npos);
}

TEST(HttpClient, TlsHasADeadlineTooAndWantsTls) {
  const Listener silent({"127.0.0.1", 0});  // the system takes the connection
  const std::string url = "https://" + to_text(silent.address());
  refused(Kind::Timeout, [&] { http_get(url, {}, SteadyClock().now() + 100ms); });
  Listener listener({"127.0.0.1", 0});
  const std::jthread plain([&] {
    Socket socket = listener.accept(soon());
    socket.write_all("HTTP/1.1 400 Bad Request\r\n\r\n", soon());
    std::array<char, 4096> buffer;
    while (socket.read_some(buffer, soon()) > 0) {
    }
  });
  const auto text =
      refused(Kind::Io, [&] { http_get("https://" + to_text(listener.address()), {}, soon()); });
  EXPECT_NE(text.find("TLS"), std::string::npos) << text;
  const auto file =
      refused(Kind::Usage, [&] { http_get(url, {}, soon(), 1 << 20, "/nowhere.pem"); });
  EXPECT_NE(file.find("'/nowhere.pem'"), std::string::npos) << file;
}
