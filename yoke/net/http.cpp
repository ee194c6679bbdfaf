// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/http.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/net/http_message.h"

namespace yoke::net {
namespace {

constexpr auto kPause = std::chrono::milliseconds(100);  // before accepting again after a failure
constexpr auto kLinger = std::chrono::seconds(1);        // for a client to read the last answer

Time now() { return SteadyClock().now(); }

// What every connection is served from.
struct Site {
  const std::map<std::string, HttpHandler>& handlers;
  const HttpLimits& limits;

  HttpResponse respond(const ParsedRequest& parsed) const {
    if (parsed.error != 0) return error_response(parsed.error);
    const auto handler = handlers.find(parsed.request.path);
    if (handler == handlers.end()) return error_response(404);
    try {
      return handler->second(parsed.request);
    } catch (const std::exception& error) {
      return {.status = 500, .body = cat(error.what(), "\n")};
    } catch (...) {
      return error_response(500);
    }
  }
};

// One client: a request is read, answered, and only then the next is read.
class Connection {
 public:
  Connection(Socket socket, const Site& site)
      : socket_(std::move(socket)), site_(site), deadline_(now() + site.limits.timeout) {}

  int fd() const { return socket_.fd(); }
  Time deadline() const { return deadline_; }
  short events() const { return out_.empty() ? POLLIN : POLLOUT; }

  // Does what can be done without waiting; false when the connection is over.
  bool advance() {
    try {
      if (out_.empty() && !receive()) return false;
      while (!lingering_) {
        if (out_.empty() && !compose()) break;
        if (!send()) break;
        deadline_ = now() + site_.limits.timeout;
        if (closing_) linger();
      }
      return true;
    } catch (const Error&) {
      return false;  // the client has gone
    }
  }

 private:
  // False at the client's end. No request waits unanswered then: they are answered as they come.
  bool receive() {
    std::array<char, 4096> buffer;
    const auto got = socket_.try_read(buffer);
    if (got && !lingering_) in_.append(buffer.data(), *got);
    return !got || *got > 0;
  }

  // Makes the answer to the first request of in_; false if it is not whole yet.
  bool compose() {
    const size_t limit = site_.limits.max_header_bytes;
    const auto size = head_size(in_);
    if (!size && in_.size() <= limit) return false;
    ParsedRequest parsed{.error = 431, .keep_alive = false};
    if (size && *size <= limit) {
      parsed = parse_request(std::string_view(in_).substr(0, *size));
      in_.erase(0, *size);
    }
    out_ = serialize(site_.respond(parsed), parsed.keep_alive, parsed.request.method == "HEAD");
    closing_ = !parsed.keep_alive;
    deadline_ = now() + site_.limits.timeout;
    return true;
  }

  // False while the client has not taken everything.
  bool send() {
    while (sent_ < out_.size()) {
      const auto moved = socket_.try_write(std::string_view(out_).substr(sent_));
      if (!moved) return false;
      sent_ += *moved;
    }
    out_.clear();
    sent_ = 0;
    return true;
  }

  // To close with bytes unread would reset the connection and could take the answer with it.
  void linger() {
    socket_.finish_writing();
    lingering_ = true;
    deadline_ = now() + kLinger;
  }

  Socket socket_;
  const Site& site_;
  Time deadline_;
  std::string in_, out_;
  size_t sent_ = 0;         // of out_
  bool closing_ = false;    // after out_
  bool lingering_ = false;  // all is sent; what still comes is thrown away
};

// The server's thread. A turn is one poll and a little work for each client that is ready.
class Loop {
 public:
  Loop(Listener& listener, const Site& site, int wake)
      : listener_(listener), site_(site), wake_(wake) {}

  void turn() {
    const auto polls = wait();
    auto connection = connections_.begin();
    for (size_t i = 2; i < polls.size(); ++i) {
      const bool over = polls[i].revents != 0 && !connection->advance();
      const bool late = now() >= connection->deadline();
      connection = over || late ? connections_.erase(connection) : std::next(connection);
    }
    if (polls[1].revents != 0) accept();
  }

  // After a failure that no client caused (no memory): the clients lose, the server goes on.
  void start_again() {
    connections_.clear();
    accept_from_ = now() + kPause;
  }

 private:
  // The wake-up, the listener, then the connections in order.
  std::vector<pollfd> wait() const {
    const Time start = now();
    const bool paused = start < accept_from_;
    const bool full = connections_.size() >= site_.limits.max_connections;
    Time until = paused ? accept_from_ : start + std::chrono::hours(1);
    std::vector<pollfd> polls{{wake_, POLLIN, 0},
                              {full || paused ? -1 : listener_.fd(), POLLIN, 0}};
    for (const auto& connection : connections_) {
      polls.push_back({connection.fd(), connection.events(), 0});
      until = std::min(until, connection.deadline());
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - start).count();
    const int ready = ::poll(polls.data(), polls.size(), int(std::max<int64_t>(left, 0)));
    if (ready < 0) {
      if (errno != EINTR) fail(Kind::Io, "poll failed: ", std::strerror(errno));
      for (auto& poll : polls) poll.revents = 0;
    }
    return polls;
  }

  void accept() {
    try {
      while (connections_.size() < site_.limits.max_connections) {
        auto socket = listener_.try_accept();
        if (!socket) return;
        connections_.emplace_back(std::move(*socket), site_);
      }
    } catch (const Error&) {
      accept_from_ = now() + kPause;  // out of descriptors: some connections must end first
    }
  }

  Listener& listener_;
  const Site& site_;
  const int wake_;
  std::list<Connection> connections_;
  Time accept_from_{};
};

}  // namespace

HttpServer::HttpServer(Listener listener, std::map<std::string, HttpHandler> handlers,
                       const HttpLimits& limits)
    : listener_(std::move(listener)),
      handlers_(std::move(handlers)),
      limits_(limits),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) fail(Kind::Io, "cannot make an eventfd: ", std::strerror(errno));
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

void HttpServer::run(const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] { ::eventfd_write(wake_.get(), 1); });
  const Site site{handlers_, limits_};
  Loop loop(listener_, site, wake_.get());
  while (!stop.stop_requested()) {
    try {
      loop.turn();
    } catch (const std::exception&) {
      loop.start_again();
    }
  }
}

}  // namespace yoke::net
