// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/http_front.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/net/socket.h"
#include "yoke/serve/keys.h"
#include "yoke/serve/pool_test.h"

namespace yoke::serve {
namespace {

struct Server {
  explicit Server(const std::string& path, const std::string& devices = "cpu:4",
                  HttpOptions options = {}, std::vector<TenantConfig> tenants = {},
                  std::vector<std::string> input = {}, ServerConfig serve = {},
                  WorkerKind workers = {.open = open_stand_in}, ServiceHooks hooks = {})
      : service({.serve = std::move(serve),
                 .models = {{.name = "m",
                             .path = path,
                             .devices = devices,
                             .batch = 1,
                             .input = std::move(input)}},
                 .tenants = std::move(tenants)},
                {.workers = std::move(workers), .slab_bytes = 16 << 20},
                observe::Log({.level = observe::Level::Off, .other_ranks = observe::Level::Off}),
                metrics, std::move(hooks)),
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

std::string infer(float value, const std::string& more = "", const std::string& parameters = "") {
  const std::string body =
      cat("{", parameters,
          "\"inputs\":[{\"name\":\"x\",\"shape\":[1,4],\"datatype\":\"FP32\",\"data\":[", value,
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

TEST(Service, KnowsATenantNoMoreThatThePoolHasLost) {
  Server server("stand-in:", "cpu:1", {}, {{.name = "a"}});
  server.service.pool().set_tenants({{.name = "b"}});  // as reload() does, before it is through
  try {
    server.service.identify("", "");
    FAIL() << "it knew it";
  } catch (const Refused& why) {
    EXPECT_EQ(why.outcome.status, Status::Forbidden);
    EXPECT_EQ(why.outcome.text, "tenant 'a' is no more");
  }
}

TEST(Service, TellsNobodyOfATenantThatWasNotNamed) {
  Server server("stand-in:", "cpu:1", {},
                {{.name = "ann", .key_sha256 = sha256("hers")}, {.name = "bob"}}, {},
                {.trust_tenant_header = true});
  const auto asks = [&](const char* key, const char* tenant) -> std::string {
    try {
      return server.service.usage(server.service.identify(key, tenant, /*must_be_tenant=*/false));
    } catch (const Refused& why) {
      return why.outcome.text;
    }
  };
  EXPECT_EQ(asks("", ""), "whose usage is asked for was not said: wanted the header 'yoke-tenant'");
  for (const char* name : {"ann", "bob"})
    EXPECT_NE(asks("", name).find(cat("[{\"tenant\":\"", name, "\"")), std::string::npos) << name;
  EXPECT_NE(asks("hers", "").find(R"([{"tenant":"ann")"), std::string::npos);
}

TEST(Service, HasNoAdminWithoutAKeyButOnThisHostAloneWhereNoTenantIsNamed) {
  const auto unload = [](const char* key, const char* tenant, ServerConfig serve,
                         std::vector<TenantConfig> tenants) -> std::string {
    Server server("stand-in:", "cpu:1", {}, std::move(tenants), {}, std::move(serve));
    try {
      auto& service = server.service;
      service.unload("m", service.identify(key, tenant, /*must_be_tenant=*/false));
      return "";
    } catch (const Refused& why) {
      return why.outcome.text;
    }
  };
  const std::vector<TenantConfig> none, two{{.name = "ann"}, {.name = "bob"}};
  const std::string wanted =
      "unloading a model needs an admin's key, and there is none: put a digest of 'yoke serve key "
      "new admin' into serve.admin_key_sha256";
  EXPECT_EQ(unload("", "", {}, none), "");
  EXPECT_EQ(unload("", "", {.trust_tenant_header = true}, two), "");
  EXPECT_EQ(unload("", "ann", {.trust_tenant_header = true}, two), wanted);
  EXPECT_EQ(unload("", "ann", {}, two), wanted) << "it may be meant for another proxy";
  for (const ServerConfig& open : {ServerConfig{.http = "0.0.0.0:0", .insecure = true},
                                   ServerConfig{.grpc = "[::]:0", .insecure = true},
                                   ServerConfig{.metrics = "0.0.0.0:0", .insecure = true}}) {
    EXPECT_EQ(unload("", "", open, none), wanted);
    EXPECT_EQ(unload("", "", open, two), wanted);
  }
  EXPECT_EQ(unload("root", "ann", {.http = "0.0.0.0:0", .admin_key_sha256 = {sha256("root")}}, two),
            "");
  EXPECT_EQ(unload("hers", "", {}, {{.name = "ann", .key_sha256 = sha256("hers")}}), wanted);
}

TEST(Service, ListensBeyondThisHostWhereKeysAreAskedForOrItWasSaid) {
  const auto refusal = [](ServerConfig serve, const std::string& digest) -> std::string {
    try {
      check({.serve = std::move(serve), .tenants = {{.name = "ann", .key_sha256 = digest}}});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string all = "0.0.0.0:0", hers = sha256("hers");
  EXPECT_EQ(refusal({.http = all}, hers), "");
  EXPECT_EQ(refusal({.trust_tenant_header = true}, hers), "");
  EXPECT_EQ(refusal({.http = all, .trust_tenant_header = true, .insecure = true}, hers), "");
  EXPECT_NE(refusal({.http = all}, "").find("no tenant has a key"), std::string::npos);
  EXPECT_NE(refusal({.http = all, .trust_tenant_header = true}, hers).find("whoever asks says"),
            std::string::npos);
}

TEST(Service, ReloadsOneAfterTheOther) {
  std::atomic<int> inside{0}, most{0};
  const auto reread = [&] {
    most = std::max(most.load(), ++inside);
    const Time enough = SteadyClock().now() + milliseconds(100);
    while (inside < 2 && SteadyClock().now() < enough) std::this_thread::yield();
    --inside;
    return Config{};
  };
  Server server("stand-in:", "cpu:1", {}, {}, {}, {}, {.open = open_stand_in}, {.reread = reread});
  {
    const std::jthread other([&] { server.service.reload(); });
    server.service.reload();
  }
  EXPECT_EQ(most, 1);
}

TEST(HttpFront, TakesNoWebPageForAnAdmin) {
  const Server server("stand-in:", "cpu:1");
  const auto status = [&](const std::string& headers) {
    auto socket = server.connect();
    socket.write_all(cat("GET /v2/models/stats HTTP/1.1\r\n", headers, "\r\n"), soon());
    return read_until(socket, "\r\n", 1).substr(9, 3);
  };
  for (const char* host :
       {"127.0.0.1:8000", "127.3.2.1", "localhost", "LocalHost:80", "[::1]:80"}) {
    EXPECT_EQ(status(cat("Host: ", host, "\r\n")), "200") << host;
    EXPECT_EQ(status(cat("Host: ", host, "\r\nOrigin: https://evil.example\r\n")), "403") << host;
  }
  for (const char* host : {"evil.example", "127.0.0.1.evil.example:80", "127.evil",
                           "localhost.evil", "[::2]:80", "[", ""})
    EXPECT_EQ(status(cat("Host: ", host, "\r\n")), "403") << host;
  EXPECT_EQ(status(""), "403");
}

TEST(Service, RefusesATenantWhoseDevicesNoModelHas) {
  try {
    const Server server("stand-in:", "cpu:1", {}, {{.name = "a", .devices = "cpu:2"}});
    FAIL() << "it started";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Config);
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

TEST(HttpFront, CountsAnswersThatAConnectionHoldsBack) {
  for (const char* parameters : {"", R"("parameters":{"yoke_stream":"own"},)"}) {
    Gate gate;
    Server server("stand-in:", "cpu:2", {}, {{.name = "a", .max_queue = 4}}, {}, {},
                  held_at(gate).workers);
    auto& pool = server.service.pool();
    auto socket = server.connect();
    socket.write_all(infer(kHeld), soon());
    wait_until([&] { return gate.num_held() == 1; });
    for (uint64_t i = 1; i <= 9; ++i) {
      socket.write_all(infer(1, "", parameters), soon());
      wait_until([&] {
        return pool.find("m")->stats.success.count + pool.view().tenants[0].refused == i;
      });
    }
    EXPECT_EQ(pool.view().tenants[0].waiting, 4u) << parameters;
    gate.open();
    socket.write_all("GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n", soon());
    const std::string answers = read_until(socket, "live", 1);
    size_t ok = 0, refused = 0;
    for (size_t at = answers.find("HTTP/1.1 "); at != answers.npos;
         at = answers.find("HTTP/1.1 ", at + 1)) {
      ok += answers.substr(at + 9, 3) == "200";
      refused += answers.substr(at + 9, 3) == "429";
    }
    EXPECT_EQ(ok, 1u + 3 + 1) << answers;  // and that it lives
    EXPECT_EQ(refused, 6u) << answers;
    EXPECT_EQ(pool.view().tenants[0].waiting, 0u);
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
  for (const char* more : {"", "Connection: close\r\n"})
    expect_within(milliseconds(250), [&] {
      Gate gate;
      Server server("stand-in:", "cpu:1", {}, {}, {}, {}, held_at(gate).workers);
      auto socket = std::make_optional(server.connect());
      for (int i = 0; i < 5; ++i) socket->write_all(infer(kHeld, more), soon());
      wait_until([&] { return gate.num_held() == 1; });
      const Time begun = SteadyClock().now();
      socket.reset();
      wait_until([&] { return server.service.pool().view().tenants[0].waiting == 0; });
      gate.open();
      return SteadyClock().now() - begun;
    });
}

TEST(HttpFront, TakesAClientThatSendsNoMoreForGone) {
  Gate gate;
  Server server("stand-in:", "cpu:1", {}, {}, {}, {}, held_at(gate).workers);
  auto& pool = server.service.pool();
  auto socket = server.connect();
  socket.write_all(infer(kHeld), soon());
  wait_until([&] { return gate.num_held() == 1; });
  socket.finish_writing();
  EXPECT_EQ(read_until(socket, "more", 1).substr(0, 13), "HTTP/1.1 499 ");  // and the end
  EXPECT_EQ(pool.find("m")->stats.success.count, 0u);
  EXPECT_EQ(pool.find("m")->stats.fail.count, 1u);
  gate.open();
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

TEST(HttpFront, SaysHowLargeABodyIsThatIsTooLarge) {
  const Server server("stand-in:", "cpu:1", {.max_body_bytes = 1000});
  for (const auto& [body, wanted] : {std::pair("Content-Length: 1001\r\n\r\n",
                                               "the body of 1001 bytes is larger than 1000 bytes"),
                                     std::pair("Transfer-Encoding: chunked\r\n\r\n3e9\r\n",
                                               "the body is larger than 1000 bytes")}) {
    auto socket = server.connect();
    socket.write_all(cat("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n", body), soon());
    const std::string answer = read_until(socket, "}", 1);
    EXPECT_EQ(answer.substr(9, 3), "413") << answer;
    EXPECT_NE(answer.find(wanted), answer.npos) << answer;
  }
}

TEST(HttpFront, SaysWhichFileOfTlsCannotBeUsedAndWhy) {
  const auto refusal = [](const char* cert) -> std::string {
    try {
      const Server server("stand-in:", "cpu:1", {.tls_cert = cert, .tls_key = "/none/key.pem"});
    } catch (const Error& error) {
      return error.what();
    }
    return "it was taken";
  };
  EXPECT_EQ(refusal("/none/cert.pem"),
            "serve.tls_cert: cannot use '/none/cert.pem': No such file or directory; wanted a PEM "
            "file of certificates");
  EXPECT_TRUE(refusal("/dev/null").starts_with("serve.tls_cert: cannot use '/dev/null': no start"))
      << refusal("/dev/null");
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

// Of a million values, answered as long text.
constexpr size_t kValues = 1'000'000;
const std::string kManyValues = cat("x:FP32[-1,", kValues, "]");
net::Socket ask_for_much(const Server& server) {
  auto socket = server.connect();
  const int small = 64 << 10;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
  const std::vector<float> values(kValues, 1.2345678e-10f);
  const std::string json =
      cat(R"({"inputs":[{"name":"x","shape":[1,)", kValues,
          R"(],"datatype":"FP32","parameters":{"binary_data_size":)", 4 * kValues, "}}]}");
  socket.write_all(
      cat("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: ",
          json.size(), "\r\nContent-Length: ", json.size() + 4 * kValues, "\r\n\r\n", json,
          std::string_view(reinterpret_cast<const char*>(values.data()), 4 * kValues)),
      soon());
  return socket;
}

TEST(HttpFront, EndsSlowReadersWhereAnswersFillTheMemory) {
  const Server server("stand-in:", "cpu:1", {.max_held_bytes = 16 << 20}, {}, {kManyValues});
  auto alone = ask_for_much(server);  // which is less than that
  const auto is_open = [](net::Socket& socket) {
    return ::send(socket.fd(), "\r", 1, MSG_NOSIGNAL) == 1;
  };
  std::this_thread::sleep_for(seconds(2));
  EXPECT_TRUE(is_open(alone));
  auto other = ask_for_much(server);
  const Time late = soon();
  while (is_open(alone) && SteadyClock().now() < late)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(is_open(alone)) << "it holds what others need";
  EXPECT_EQ(read_until(other, "]}]}", 1).substr(9, 3), "200");
}

TEST(HttpFront, WritesToASlowReaderAsLongAsItReads) {
  const Server server("stand-in:", "cpu:1", {.idle = seconds(2)}, {}, {kManyValues});
  auto socket = ask_for_much(server);
  std::string piece(256 << 10, '\0');
  size_t bytes = 0;
  for (Time next = SteadyClock().now(); bytes < 10 * kValues;) {
    const size_t some = socket.read_some(piece, soon());
    ASSERT_GT(some, 0u) << "after " << bytes << " bytes";
    if ((bytes + some) / piece.size() > bytes / piece.size())
      while (SteadyClock().now() < next) std::this_thread::yield();
    next = SteadyClock().now() + milliseconds(150);  // 40 times, which is thrice as long
    bytes += some;
  }
}

// Says what it is asked, or goes on until nobody listens.
struct Talks final : Runner {
  explicit Talks(std::atomic<bool>& was_ended) : ended(was_ended) { told.has_words = true; }
  const Facts& facts() const override { return told; }
  void run(const Call&, Outputs&) override {}
  void generate(const std::string& prompt, const std::string&,
                const std::function<bool(std::string_view)>& on_text) override {
    if (prompt != "on and on") return void(prompt.empty() || on_text(prompt));
    const Time late = soon();
    while (on_text("on ") && SteadyClock().now() < late)
      std::this_thread::sleep_for(milliseconds(1));
    ended = true;
  }
  Facts told;
  std::atomic<bool>& ended;
};
WorkerKind talks(std::atomic<bool>& ended) {
  return {.open = [&ended](const ReplicaSpec&) { return std::make_unique<Talks>(ended); }};
}
std::string prompt(const std::string& text) {
  const std::string body = cat(R"({"text_input":")", text, "\"}");
  return cat("POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: ",
             body.size(), "\r\n\r\n", body);
}

TEST(HttpFront, StreamsTextsAsEventsEmptyOnesToo) {
  std::atomic<bool> ended{false};
  const Server server("talks", "cpu:1", {}, {}, {}, {}, talks(ended));
  for (const char* text : {"Hi", ""}) {
    auto socket = server.connect();
    socket.write_all(prompt(text), soon());
    const std::string answer = read_until(socket, "\r\n0\r\n\r\n", 1);
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")) << answer;
    EXPECT_NE(answer.find(cat(R"(data: {"model_name":"m","model_version":"1","text_output":")",
                              text, "\"}\n\n")),
              answer.npos)
        << answer;
  }
}

TEST(HttpFront, EndsATextWhoseReaderLeaves) {
  std::atomic<bool> ended{false};
  const Server server("talks", "cpu:1", {}, {}, {}, {}, talks(ended));
  auto socket = std::make_optional(server.connect());
  socket->write_all(prompt("on and on"), soon());
  EXPECT_NE(read_until(*socket, "data: ", 2).find("text/event-stream"), std::string::npos);
  EXPECT_FALSE(ended);
  socket.reset();
  wait_until([&] { return ended.load(); });
}

TEST(HttpFront, EndsABodyThatDripsAndIsReadyMeanwhile) {
  const Server server("stand-in:", "cpu:1", {.idle = std::chrono::milliseconds(300)});
  auto slow = server.connect();
  slow.write_all("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n",
                 soon());
  const Time begun = SteadyClock().now();
  for (Time next = begun;; next += milliseconds(10)) {
    while (SteadyClock().now() < next) std::this_thread::yield();
    ASSERT_LT(SteadyClock().now() - begun, seconds(20));
    try {
      slow.write_all(" ", soon());
    } catch (const Error&) {
      break;
    }
    auto other = server.connect();
    other.write_all("GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n", soon());
    ASSERT_EQ(read_until(other, "true}", 1).substr(9, 3), "200");
  }
}

TEST(HttpFront, NamesNoModelToWhoHasNoKey) {
  const Server server("stand-in:", "cpu:1", {}, {{.name = "ann", .key_sha256 = sha256("hers")}});
  const auto ask = [&](const std::string& target) {
    auto socket = server.connect();
    socket.write_all(cat("GET /v2/models/", target, " HTTP/1.1\r\nHost: a\r\n\r\n"), soon());
    const std::string answer = read_until(socket, "}", 1);
    return answer.substr(9, 4) + answer.substr(answer.find("\r\n\r\n") + 4);
  };
  EXPECT_EQ(ask("m/ready"), R"(200 {"name":"m","ready":true})");
  EXPECT_EQ(ask("z/ready"), R"(404 {"error":"there is no model 'z'"})");
  EXPECT_EQ(ask("m/versions/7/ready"), R"(404 {"error":"there is no model 'm' of version 7"})");
  EXPECT_EQ(ask("z").substr(0, 3), "401");
}

TEST(HttpFront, LooksAtTheKeyBeforeTheBody) {
  const Server server("stand-in:", "cpu:1", {}, {{.name = "ann", .key_sha256 = sha256("hers")}});
  for (const char* key : {"", "yoke-key: other\r\n"}) {
    auto socket = server.connect();
    socket.write_all(cat("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n", key,
                         "Expect: 100-continue\r\nContent-Length: 100000\r\n\r\n"),
                     soon());
    const std::string answer = read_until(socket, "never", 1);
    EXPECT_EQ(answer.substr(0, 13), "HTTP/1.1 401 ") << answer;
  }
  auto socket = server.connect();
  socket.write_all(infer(1, "authorization: bearer hers\r\n"), soon());
  EXPECT_EQ(read_until(socket, "]}]}", 1).substr(9, 3), "200");
}

TEST(HttpFront, BoundsBodiesThatAreNotWhole) {
  const Server server("stand-in:", "cpu:1", {.max_held_bytes = 3 << 20});
  const std::string part(64 << 10, ' ');
  std::vector<net::Socket> clients;
  const auto send_part = [&](const char* coding) {
    clients.push_back(server.connect());
    clients.back().write_all(cat("POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n", coding, part),
                             soon());
  };
  for (int i = 0; i < 3; ++i)
    send_part("Content-Length: 2000000\r\n\r\n");  // 1 MiB is made room for
  net::Socket whole = server.connect();
  const auto answer = [&](const std::string& request) {
    whole.write_all(request, soon());
    return read_until(whole, "}", 1).substr(9, 3);
  };
  EXPECT_EQ(answer("GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n"), "200");
  for (const char* coding :
       {"Content-Length: 2000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n10000\r\n"}) {
    send_part(coding);
    const std::string refused = read_until(clients.back(), "\r\n\r\n", 1);
    EXPECT_EQ(refused.substr(9, 3), "503") << coding;
    EXPECT_NE(refused.find("Retry-After: 1"), refused.npos) << coding;
    clients.pop_back();
  }
  EXPECT_EQ(answer(infer(1)), "200");
  clients.pop_back();  // there is room again
  send_part("Content-Length: 65537\r\n\r\n");
  clients.back().write_all(" ", soon());
  EXPECT_EQ(read_until(clients.back(), "\r\n", 1).substr(9, 3), "400");
}

TEST(HttpFront, LeavesSomeDescriptors) {
  const Server server("stand-in:");
  const auto files = [] { return rlim_t(net::Descriptor(::dup(0)).get()); };
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{.rlim_cur = files() + 100, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);
  std::vector<net::Socket> clients;
  for (int i = 0; i < 60; ++i) clients.push_back(server.connect());
  const Time settled = SteadyClock().now() + std::chrono::milliseconds(200);
  while (SteadyClock().now() < settled) ASSERT_LT(files(), few.rlim_cur - 10);
  clients.erase(clients.begin(), clients.end() - 1);
  clients[0].write_all(infer(1), soon());
  EXPECT_EQ(read_until(clients[0], "]}]}", 1).substr(9, 3), "200");
  ::setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace yoke::serve
