// SPDX-License-Identifier: Apache-2.0
// TCP with a deadline on every wait. Nothing blocks past its deadline, an interrupted call goes on,
// and a peer that has gone is an error, never a SIGPIPE. Errors are Kind::Io, or Kind::Timeout at
// the deadline. Owns: the descriptor, which a child process does not inherit.
// Threads: one thread reads and another may write; all else one thread at a time.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "yoke/base/clock.h"
#include "yoke/net/address.h"

namespace yoke::net {

// A file descriptor that is closed at the end of its life.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_;
};

// One connection.
class Socket {
 public:
  // Tries every address of the host's name in turn.
  static Socket connect(const Address& to, Time deadline);
  Socket(Descriptor descriptor, std::string peer);

  const std::string& peer() const { return peer_; }  // for messages: "127.0.0.1:34012"
  int fd() const { return descriptor_.get(); }

  size_t read_some(std::span<char> into, Time deadline);  // at least 1; 0 at the peer's end
  void read_all(std::span<char> into, Time deadline);     // an early end is an error
  void write_all(std::string_view data, Time deadline);
  void finish_writing();  // the peer reads the end; reading goes on
  // A host or a link that is gone breaks the connection within about 10 s, also when nothing is
  // being sent. A peer that is merely stopped does not.
  void notice_dead_peer();

  // The same without waiting, for a caller that polls: nothing when it would have to wait.
  std::optional<size_t> try_read(std::span<char> into);
  std::optional<size_t> try_write(std::string_view data);

 private:
  Descriptor descriptor_;  // non-blocking
  std::string peer_;
};

// Bound and listening from construction: with port 0 the system chooses a free one, and address()
// tells it, so that it can be published before anyone connects.
class Listener {
 public:
  explicit Listener(const Address& at);

  const Address& address() const { return address_; }  // with the real port
  int fd() const { return descriptor_.get(); }
  Socket accept(Time deadline);
  std::optional<Socket> try_accept();  // nothing when nobody is waiting

 private:
  Address address_;
  Descriptor descriptor_;
};

}  // namespace yoke::net
