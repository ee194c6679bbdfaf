// SPDX-License-Identifier: Apache-2.0
// TLS over a Socket, of the side that connects: the peer's certificate must be signed by one whom
// the system trusts, or by one in a file, and name the host. Every wait has a deadline; errors are
// Kind::Io, Kind::Usage for the file, and Kind::Timeout at the deadline.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "yoke/net/socket.h"

namespace yoke::net {

class TlsSocket {
 public:
  // Shakes hands. A PEM file of certificates counts instead of the system's, if there is one.
  TlsSocket(Socket& socket, const std::string& host, const std::string& ca_file, Time deadline);
  ~TlsSocket();

  size_t read_some(std::span<char> into, Time deadline);  // at least 1; 0 where the peer said so
  void write_all(std::string_view data, Time deadline);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::net
