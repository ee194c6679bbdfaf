// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/net/resolve.h"

namespace yoke::net {
namespace {

// True when the descriptor is ready (or broken: the next call tells), false at the deadline.
bool wait_ready(int fd, short events, Time deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock().now());
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, int(std::clamp<int64_t>(left.count(), 0, 1 << 30)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail(Kind::Io, "poll failed: ", std::strerror(errno));
    if (SteadyClock().now() >= deadline) return false;
  }
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// A system call's result: nothing when it would have to wait. Goes on when interrupted.
template <typename Call>
std::optional<size_t> attempt(const char* what, const std::string& peer, Call call) {
  while (true) {
    const ssize_t moved = call();
    if (moved >= 0) return size_t(moved);
    if (would_block(errno)) return std::nullopt;
    if (errno != EINTR) fail(Kind::Io, "cannot ", what, " ", peer, ": ", std::strerror(errno));
  }
}

Descriptor open_socket(const Endpoint& endpoint) {
  const int type = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
  return Descriptor(::socket(endpoint.storage.ss_family, type, 0));
}

void set_flag(const Descriptor& descriptor, int level, int option) {
  const int on = 1;
  ::setsockopt(descriptor.get(), level, option, &on, sizeof on);
}

// 0, or the reason why this endpoint cannot be reached; ETIMEDOUT at the deadline.
int try_connect(const Descriptor& descriptor, const Endpoint& to, Time deadline) {
  if (!descriptor) return errno;
  // Interrupted, a non-blocking connect goes on by itself.
  if (::connect(descriptor.get(), to.get(), to.size) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  if (!wait_ready(descriptor.get(), POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(descriptor.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

// 0, or the reason why this endpoint cannot be listened on.
int try_listen(const Descriptor& descriptor, const Endpoint& at) {
  if (!descriptor) return errno;
  // Lets a restarted server have its port back while old connections die away; a port that another
  // socket listens on is refused all the same.
  set_flag(descriptor, SOL_SOCKET, SO_REUSEADDR);
  if (::bind(descriptor.get(), at.get(), at.size) != 0) return errno;
  return ::listen(descriptor.get(), SOMAXCONN) == 0 ? 0 : errno;
}

Endpoint local_endpoint(const Descriptor& descriptor) {
  Endpoint endpoint{.size = sizeof(sockaddr_storage)};
  if (::getsockname(descriptor.get(), reinterpret_cast<sockaddr*>(&endpoint.storage),
                    &endpoint.size) != 0)
    fail(Kind::Io, "cannot ask a socket for its port: ", std::strerror(errno));
  return endpoint;
}

[[noreturn]] void fail_to_listen(const Address& at, int error) {
  const char* todo = error == EADDRINUSE ? "; choose another port, or 0 to let the system choose"
                     : error == EACCES   ? "; ports below 1024 need privileges, choose a higher one"
                     : error == EADDRNOTAVAIL ? "; that is no address of this host"
                                              : "";
  const char* why = error == EADDRINUSE ? "the port is in use" : std::strerror(error);
  fail(Kind::Io, "cannot listen on ", to_text(at), ": ", why, todo);
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Descriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Socket::Socket(Descriptor descriptor, std::string peer)
    : descriptor_(std::move(descriptor)), peer_(std::move(peer)) {
  set_flag(descriptor_, IPPROTO_TCP, TCP_NODELAY);
}

Socket Socket::connect(const Address& to, Time deadline) {
  if (to.host.empty() || to.port == 0)
    fail(Kind::Usage, "cannot connect to '", to_text(to), "': it needs a host and a port");
  const auto endpoints = resolve(to, Purpose::Connect, deadline);
  int error = 0;
  for (size_t i = 0; i < endpoints.size(); ++i) {
    // An address that swallows packets must not use up the time of those after it.
    const Time now = SteadyClock().now();
    const Time until = now + (deadline - now) / int64_t(endpoints.size() - i);
    Descriptor descriptor = open_socket(endpoints[i]);
    error = try_connect(descriptor, endpoints[i], until);
    if (error == 0) return Socket(std::move(descriptor), to_text(endpoints[i]));
  }
  if (error == ETIMEDOUT)
    fail(Kind::Timeout, "no answer from ", to_text(to),
         " before the deadline; check that the host is up and that no firewall is between");
  fail(Kind::Io, "cannot connect to ", to_text(to), ": ", std::strerror(error),
       error == ECONNREFUSED ? "; nothing listens there, start the server first" : "");
}

std::optional<size_t> Socket::try_read(std::span<char> into) {
  YOKE_CHECK(!into.empty());  // 0 means the end
  return attempt("read from", peer_, [&] { return ::recv(fd(), into.data(), into.size(), 0); });
}

std::optional<size_t> Socket::try_write(std::string_view data) {
  return attempt("write to", peer_,
                 [&] { return ::send(fd(), data.data(), data.size(), MSG_NOSIGNAL); });
}

size_t Socket::read_some(std::span<char> into, Time deadline) {
  while (true) {
    if (const auto got = try_read(into)) return *got;
    if (!wait_ready(fd(), POLLIN, deadline))
      fail(Kind::Timeout, "nothing came from ", peer_, " before the deadline");
  }
}

void Socket::read_all(std::span<char> into, Time deadline) {
  size_t done = 0;
  while (done < into.size()) {
    const size_t got = read_some(into.subspan(done), deadline);
    if (got == 0)
      fail(Kind::Io, peer_, " closed the connection after ", done, " of ", into.size(), " bytes");
    done += got;
  }
}

void Socket::write_all(std::string_view data, Time deadline) {
  while (!data.empty()) {
    if (const auto sent = try_write(data))
      data.remove_prefix(*sent);
    else if (!wait_ready(fd(), POLLOUT, deadline))
      fail(Kind::Timeout, peer_, " did not take the last ", data.size(),
           " bytes before the deadline");
  }
}

void Socket::notice_dead_peer() {
  set_flag(descriptor_, SOL_SOCKET, SO_KEEPALIVE);
  auto set = [&](int option, int value) {
    ::setsockopt(fd(), IPPROTO_TCP, option, &value, sizeof value);
  };
  set(TCP_KEEPIDLE, 2);  // seconds
  set(TCP_KEEPINTVL, 2);
  set(TCP_KEEPCNT, 4);
  set(TCP_USER_TIMEOUT, 10'000);  // milliseconds, for what was sent and never acknowledged
}

void Socket::finish_writing() { ::shutdown(fd(), SHUT_WR); }

Listener::Listener(const Address& at) : address_(at) {
  const Time deadline = SteadyClock().now() + std::chrono::seconds(10);  // for a name to be found
  for (const Endpoint& endpoint : resolve(at, Purpose::Listen, deadline)) {
    descriptor_ = open_socket(endpoint);
    const int error = try_listen(descriptor_, endpoint);
    if (error == 0) {
      address_.port = port_of(local_endpoint(descriptor_));
      return;
    }
    descriptor_.reset();
    // "localhost" may name IPv6 first on a host that has none.
    if (error != EADDRNOTAVAIL && error != EAFNOSUPPORT) fail_to_listen(at, error);
  }
  fail_to_listen(at, EADDRNOTAVAIL);
}

std::optional<Socket> Listener::try_accept() {
  while (true) {
    Endpoint peer{.size = sizeof(sockaddr_storage)};
    Descriptor descriptor(::accept4(fd(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.size,
                                    SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (descriptor) return Socket(std::move(descriptor), to_text(peer));
    if (would_block(errno)) return std::nullopt;
    // A client that gave up between its call and ours is none of our business.
    if (errno != EINTR && errno != ECONNABORTED)
      fail(Kind::Io, "cannot accept on ", to_text(address_), ": ", std::strerror(errno));
  }
}

Socket Listener::accept(Time deadline) {
  while (true) {
    if (auto socket = try_accept()) return std::move(*socket);
    if (!wait_ready(fd(), POLLIN, deadline))
      fail(Kind::Timeout, "nobody connected to ", to_text(address_), " before the deadline");
  }
}

}  // namespace yoke::net
