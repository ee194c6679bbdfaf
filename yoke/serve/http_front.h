// SPDX-License-Identifier: Apache-2.0
// REST for a Service: HTTP/1.1 by Boost.Beast, kept alive, pipelined, optionally in TLS. No client
// holds a thread: all waits are asynchronous, with bounds on what a client may send and how long it
// may be silent. Answers leave a connection in the order of its requests; a client that goes away
// cancels what it asked for.
// Owns: the listener, connections and threads.
#pragma once

#include <memory>
#include <string>

#include "yoke/serve/service.h"

namespace yoke::serve {

struct HttpOptions {
  std::string address = "127.0.0.1:0";
  int threads = 1;
  int64_t max_connections = 1024;
  size_t max_body_bytes = 256 << 20;
  // Of bodies that are not whole, and of answers that clients do not take; one alone may have more.
  size_t max_held_bytes = 1 << 30;
  Duration idle = std::chrono::seconds(60);
  std::string tls_cert = {}, tls_key = {};  // files of PEM; empty: no TLS
};

class HttpFront {
 public:
  HttpFront(Service& service, const HttpOptions& options);
  ~HttpFront();
  std::string address() const;  // with the real port
  // No new connections; answers that are under way are written until `deadline`.
  void shut_down(Time deadline);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::serve
