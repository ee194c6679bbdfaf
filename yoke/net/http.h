// SPDX-License-Identifier: Apache-2.0
// A small HTTP/1.1 server for what a program tells about itself: metrics, health, a page. GET and
// HEAD only, one thread, and bounds on everything a client can use up: connections, header bytes,
// time. It does not serve models; their traffic needs a larger server.
//
//   HttpServer server(Listener({"127.0.0.1", 0}), {{"/metrics", [&](auto&) { ... }}});
//   publish(server.address());
//
// Owns: the listener, the connections and the thread, which the destructor joins at once.
// Threads: handlers run on the server's thread, one at a time, and should answer quickly.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <thread>

#include "yoke/net/socket.h"

namespace yoke::net {

struct HttpRequest {
  std::string method = {};         // GET or HEAD
  std::string path = {};           // "/metrics"
  std::string query = {};          // what follows the question mark, as it came
  std::string authorization = {};  // that header, as it came
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
};

// An exception becomes a 500 with its message.
using HttpHandler = std::function<HttpResponse(const HttpRequest&)>;

struct HttpLimits {
  size_t max_connections = 64;                  // further clients wait in the system's queue
  size_t max_header_bytes = 16384;              // more is answered with 431
  Duration timeout = std::chrono::seconds(10);  // for a request to come, for an answer to be taken
};

class HttpServer {
 public:
  HttpServer(Listener listener, std::map<std::string, HttpHandler> handlers,
             const HttpLimits& limits = {});
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const Address& address() const { return listener_.address(); }

 private:
  void run(const std::stop_token& stop);

  Listener listener_;
  const std::map<std::string, HttpHandler> handlers_;
  const HttpLimits limits_;
  Descriptor wake_;  // an eventfd that ends the thread's poll
  std::jthread thread_;
};

}  // namespace yoke::net
