// SPDX-License-Identifier: Apache-2.0
// A client's connection: it reads requests, hands them to the service and writes the answers in
// order. Threads: all of a connection happens on its lane's.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <set>
#include <thread>

#include "yoke/serve/http_front.h"
#include "yoke/serve/rest_body.h"

namespace yoke::serve {

class HttpPeer;

// What the connections of one thread share.
struct HttpLane {
  RestReader reader = {};
  std::set<HttpPeer*> peers = {};
  boost::asio::io_context context{1};  // its handlers hold connections, which use the above
  boost::asio::steady_timer sweep{context};
  bool dispatches = false;  // soon, when what has come by now is read
  std::jthread thread = {};
};

struct HttpShared {
  Service& service;
  const HttpOptions options;
  std::atomic<int64_t> connections{0}, unwritten{0};
  std::atomic<int64_t> unread{0};     // requests of which a part has come
  std::atomic<size_t> body_bytes{0};  // memory of those
  std::atomic<size_t> unsent{0};      // bytes of answers
  std::atomic<bool> closing{false};
  std::atomic<bool> full{false};  // further clients wait
  Errands::Client errands{service.errands()};
};

// A connection as its thread's sweep sees it.
class HttpPeer {
 public:
  virtual ~HttpPeer() = default;
  // Null where it is about to be deleted.
  virtual std::shared_ptr<HttpPeer> hold() = 0;
  virtual void look(Time now) = 0;
  virtual void abandon() = 0;
};

// Takes over a socket that was accepted, in TLS where that is not null. On the lane's thread.
void start_connection(HttpShared& shared, HttpLane& lane, boost::asio::ip::tcp::socket socket,
                      boost::asio::ssl::context* tls);

}  // namespace yoke::serve
