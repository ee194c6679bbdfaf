// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/load.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <queue>
#include <thread>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/base/text.h"
#include "yoke/net/resolve.h"
#include "yoke/net/socket.h"

namespace yoke::serve {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);  // for those whom nobody answers

Time now() { return SteadyClock().now(); }

struct Head {
  int status = 0;
  size_t bytes = 0, body_bytes = 0;
  bool closes = false;
};

// The head of an answer once it is whole; its status is 0 where it tells no length.
std::optional<Head> parse_head(std::string_view text) {
  const size_t end = text.find("\r\n\r\n");
  if (end == text.npos) return std::nullopt;
  Head head{.bytes = end + 4};
  const auto number = [&](size_t at, auto& into) {
    return std::from_chars(text.data() + at, text.data() + end, into).ec == std::errc();
  };
  bool has_length = false;
  for (size_t line = text.find("\r\n"); line < end; line = text.find("\r\n", line + 2)) {
    const char* name = text.data() + line + 2;
    const auto is = [&](std::string_view wanted) {
      return line + 2 + wanted.size() <= end &&
             ::strncasecmp(name, wanted.data(), wanted.size()) == 0;
    };
    if (is("content-length: ")) has_length = number(line + 18, head.body_bytes);
    if (is("connection: close")) head.closes = true;
  }
  if (!has_length || !text.starts_with("HTTP/1.") || !number(9, head.status)) head.status = 0;
  return head;
}

void append_request(const net::Address& to, const LoadRequest& request, std::string& out) {
  out.append("POST ").append(request.path).append(" HTTP/1.1\r\nHost: ").append(to.host);
  out.append("\r\nContent-Length: ").append(std::to_string(request.body.size())).append("\r\n");
  out.append(request.headers).append("\r\n").append(request.body);
}

struct Arrival {
  uint64_t number = 0;
  Time due = {};
};

struct Connection {
  net::Descriptor socket = net::Descriptor();
  size_t user = 0;
  bool busy = false;
  Arrival asked = {};
  Time sent_at = {};
  LoadRequest request = {};
  std::string out = {}, in = {};
  size_t sent = 0;
  std::optional<Head> head = {};
};

struct Leave {
  Time at = {};
  Connection* connection = nullptr;
  uint64_t number = 0;
  bool operator>(const Leave& other) const { return at > other.at; }
};

// What one thread does: its part of every user's connections.
class Driver {
 public:
  Driver(const LoadOptions& options, const std::vector<LoadUser>& users, Time start, int thread)
      : options_(options),
        end_(start + options.length),
        counted_from_(start + options.warm_up),
        thread_(uint64_t(thread)),
        endpoint_(net::resolve(options.to, net::Purpose::Connect, end_).front()),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_) fail(Kind::Io, "cannot make an epoll: ", std::strerror(errno));
    for (const auto& user : users) {
      auto& asker = askers_.emplace_back();
      asker.user = &user;
      const int more = user.connections % options.threads > thread ? 1 : 0;
      asker.limit = size_t(user.connections / options.threads + more);
      asker.begin = start + user.begin;
      asker.end = user.end < options.length ? start + user.end : end_;
      asker.next_due = asker.begin;
      asker.left = user.count / uint64_t(options.threads);
      if (user.rate > 0) asker.next_due += gap(asker);
    }
  }

  std::vector<LoadReport> run() {
    ::prctl(PR_SET_TIMERSLACK, 1);
    while (true) {
      const Time time = now();
      Time wake = time + kLook;
      bool over = true;
      for (auto& asker : askers_) {
        arrive(asker, time, wake);
        while (!asker.waiting.empty() && asker.busy < asker.limit) ask(asker);
        over = over && asker.busy == 0 && asker.waiting.empty() && !has_more(asker, time);
      }
      if (over || time > end_ + options_.patience) break;
      leave(time, wake);
      look(time);
      wait(wake);
    }
    std::vector<LoadReport> reports;
    for (auto& asker : askers_) {
      asker.report.others[kLate] += asker.busy + asker.waiting.size();
      std::erase_if(asker.report.others, [](const auto& entry) { return entry.second == 0; });
      std::ranges::sort(asker.report.latencies);
      reports.push_back(std::move(asker.report));
    }
    return reports;
  }

 private:
  struct Asker {
    const LoadUser* user = nullptr;
    LoadReport report = {};
    std::deque<Arrival> waiting = {};
    std::vector<Connection*> idle = {};
    size_t limit = 0, busy = 0;
    uint64_t next = 0, left = 0;
    Time begin = {}, end = {}, next_due = {};
  };

  Duration gap(const Asker& asker) const {
    return gap_before(*asker.user, asker.next, thread_, options_.threads);
  }

  bool has_more(const Asker& asker, Time time) const {
    const Time next = asker.user->rate > 0 ? asker.next_due : std::max(time, asker.begin);
    return asker.left > 0 && asker.limit > 0 && next < asker.end;
  }

  // Those who are due by now; `wake` becomes the time of the next where it is earlier.
  void arrive(Asker& asker, Time time, Time& wake) {
    const auto push = [&](Time due) {
      asker.waiting.push_back({asker.next++ * uint64_t(options_.threads) + thread_, due});
      --asker.left;
    };
    if (asker.user->rate == 0) {
      if (time < asker.begin) wake = std::min(wake, asker.begin);
      while (time >= asker.begin && has_more(asker, time) &&
             asker.busy + asker.waiting.size() < asker.limit)
        push(time);
      return;
    }
    while (has_more(asker, time) && asker.next_due <= time) {
      push(asker.next_due);
      asker.next_due += gap(asker);
    }
    if (has_more(asker, time)) wake = std::min(wake, asker.next_due);
  }

  void ask(Asker& asker) {
    Connection* connection = nullptr;
    if (!asker.idle.empty()) {
      connection = asker.idle.back();
      asker.idle.pop_back();
    } else {
      connection = connections_.emplace_back(std::make_unique<Connection>()).get();
      connection->user = size_t(&asker - askers_.data());
    }
    connection->asked = asker.waiting.front();
    asker.waiting.pop_front();
    connection->busy = true;
    ++asker.busy;
    auto& request = connection->request;
    request.leave_after = {};
    asker.user->make(connection->asked.number, request);
    auto& out = connection->out;
    out.clear();
    append_request(options_.to, request, out);
    connection->sent = 0;
    connection->in.clear();
    connection->head.reset();
    connection->sent_at = now();
    if (request.leave_after > Duration::zero())
      leaves_.push(
          {connection->sent_at + request.leave_after, connection, connection->asked.number});
    if (!connection->socket) open(*connection);
    if (connection->busy) send(*connection);
  }

  void open(Connection& connection) {
    connection.socket = net::Descriptor(::socket(
        endpoint_.get()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    const int fd = connection.socket.get(), on = 1;
    if (fd < 0)
      fail(Kind::Io, "cannot open a socket: ", std::strerror(errno),
           "; take fewer connections or raise ulimit -n");
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLET, .data = {.ptr = &connection}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
    if (::connect(fd, endpoint_.get(), endpoint_.size) != 0 && errno != EINPROGRESS)
      end(connection, kRefused);
  }

  void send(Connection& connection) {
    while (connection.sent < connection.out.size()) {
      const ssize_t moved = ::send(connection.socket.get(), connection.out.data() + connection.sent,
                                   connection.out.size() - connection.sent, MSG_NOSIGNAL);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;  // epoll will tell
      if (moved < 0) return end(connection, errno == ECONNREFUSED ? kRefused : kBroken);
      connection.sent += size_t(moved);
    }
  }

  void receive(Connection& connection) {
    std::array<char, 65536> buffer;
    while (connection.socket) {
      const ssize_t got = ::recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
      if (got <= 0) {
        const bool refused = got < 0 && errno == ECONNREFUSED;
        connection.socket.reset();
        if (connection.busy) end(connection, refused ? kRefused : kBroken);
        return;
      }
      if (!connection.busy) continue;  // nothing was asked
      connection.in.append(buffer.data(), size_t(got));
      if (!connection.head) connection.head = parse_head(connection.in);
      if (!connection.head) continue;
      const Head head = *connection.head;
      if (head.status == 0) return end(connection, kBroken);
      if (connection.in.size() < head.bytes + head.body_bytes) continue;
      end(connection, head.status,
          std::string_view(connection.in).substr(head.bytes, head.body_bytes), head.closes);
    }
  }

  void end(Connection& connection, int status, std::string_view body = {}, bool closes = false) {
    auto& asker = askers_[connection.user];
    auto& report = asker.report;
    const LoadAnswer answer{
        .status = status, .body = body, .due = connection.asked.due, .done = now()};
    if (asker.user->check && !asker.user->check(connection.asked.number, answer)) ++report.wrong;
    report.count(answer, connection.request.rows, counted_from_);
    connection.busy = false;
    --asker.busy;
    if (closes || status <= 0) connection.socket.reset();
    if (status == kRefused) {
      --asker.limit;  // nobody is there: do not knock forever
      if (asker.limit == 0) report.others[kRefused] += std::exchange(asker.waiting, {}).size();
    } else {
      asker.idle.push_back(&connection);
    }
  }

  void leave(Time time, Time& wake) {
    for (; !leaves_.empty() && leaves_.top().at <= time; leaves_.pop()) {
      const auto& top = leaves_.top();
      if (top.connection->busy && top.connection->asked.number == top.number)
        end(*top.connection, kLeft);
    }
    if (!leaves_.empty()) wake = std::min(wake, leaves_.top().at);
  }

  void look(Time time) {
    if (time < next_look_) return;
    next_look_ = time + kLook;
    for (auto& connection : connections_)
      if (connection->busy && time - connection->sent_at > options_.patience)
        end(*connection, kLate);
  }

  void wait(Time wake) {
    const auto left = std::max(wake - now(), Duration::zero());
    const timespec most{.tv_sec = left.count() / 1'000'000'000,
                        .tv_nsec = left.count() % 1'000'000'000};
    std::array<epoll_event, 256> events;
    const int ready =
        ::epoll_pwait2(epoll_.get(), events.data(), int(events.size()), &most, nullptr);
    if (ready < 0 && errno != EINTR) fail(Kind::Io, "epoll failed: ", std::strerror(errno));
    for (int i = 0; i < ready; ++i) {
      auto& connection = *static_cast<Connection*>(events[size_t(i)].data.ptr);
      if (connection.busy) send(connection);
      if (connection.socket) receive(connection);
    }
  }

  const LoadOptions& options_;
  const Time end_, counted_from_;
  const uint64_t thread_;
  const net::Endpoint endpoint_;
  const net::Descriptor epoll_;
  std::vector<Asker> askers_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::priority_queue<Leave, std::vector<Leave>, std::greater<>> leaves_;
  Time next_look_ = {};
};

}  // namespace

Duration gap_before(const LoadUser& user, uint64_t number, uint64_t thread, int threads) {
  const double mean = threads / user.rate;
  const Rng rng(user.seed, "arrivals", thread);
  const double chance = 1 - double(rng.uniform(number));
  return Duration(int64_t(1e9 * mean * (user.poisson ? -std::log(chance) : 1)));
}

double LoadReport::percentile_ms(double part) const {
  if (latencies.empty()) return 0;
  const auto rank = size_t(std::ceil(part * double(latencies.size())));
  const auto at = std::min(std::max<size_t>(rank, 1), latencies.size()) - 1;
  return double(latencies[at].count()) / 1e6;
}

uint64_t LoadReport::failed() const {
  uint64_t sum = 0;
  for (const auto& [status, count] : others) sum += status == kLeft ? 0 : count;
  return sum;
}

void LoadReport::count(const LoadAnswer& answer, int64_t num_rows, Time from) {
  if (answer.due < from) return;
  seconds = std::chrono::duration<double>(answer.done - from).count();
  if (answer.status != 200) {
    ++others[answer.status];
    return;
  }
  ++requests;
  rows += uint64_t(num_rows);
  latencies.push_back(answer.done - answer.due);
}

void LoadReport::add(const LoadReport& other) {
  requests += other.requests, rows += other.rows, wrong += other.wrong;
  for (const auto& [status, count] : other.others) others[status] += count;
  seconds = std::max(seconds, other.seconds);
  std::vector<Duration> both;
  both.reserve(latencies.size() + other.latencies.size());
  std::ranges::merge(latencies, other.latencies, std::back_inserter(both));
  latencies = std::move(both);
}

std::string others_text(const LoadReport& report) {
  std::vector<std::string> parts;
  for (const auto& [status, count] : report.others)
    parts.push_back(cat(status == kBroken    ? "broken"
                        : status == kLate    ? "late"
                        : status == kRefused ? "refused"
                        : status == kLeft    ? "left"
                                             : std::to_string(status),
                        " x ", count));
  return parts.empty() ? "none" : join(parts, ", ");
}

std::vector<LoadReport> run_load(const LoadOptions& options, const std::vector<LoadUser>& users) {
  if (options.threads < 1) fail(Kind::Usage, "a load has 1 thread or more, got ", options.threads);
  for (const auto& user : users)
    if (!user.make || user.connections < 1)
      fail(Kind::Usage, "a user of a load makes requests, over 1 connection or more");
  const Time start = now();
  std::vector<std::vector<LoadReport>> parts(size_t(options.threads));
  std::vector<std::exception_ptr> errors(parts.size());
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < options.threads; ++i)
      threads.emplace_back([&, i] {
        try {
          parts[size_t(i)] = Driver(options, users, start, i).run();
        } catch (...) {
          errors[size_t(i)] = std::current_exception();
        }
      });
  }
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
  for (size_t i = 1; i < parts.size(); ++i)
    for (size_t user = 0; user < users.size(); ++user) parts[0][user].add(parts[i][user]);
  return parts[0];
}

uint64_t run_pipeline(const net::Address& to, uint64_t count, uint64_t most, Duration patience,
                      const std::function<void(uint64_t, LoadRequest&)>& make,
                      const std::function<void(const LoadAnswer&)>& on_answer) {
  const Time deadline = now() + patience;
  auto socket = net::Socket::connect(to, deadline);
  LoadRequest request;
  std::string out, in;
  std::array<char, 65536> buffer;
  uint64_t sent = 0, came = 0;
  try {
    while (came < count) {
      for (out.clear(); sent < std::min(count, came + most); ++sent) {
        make(sent, request);
        append_request(to, request, out);
      }
      socket.write_all(out, deadline);
      const size_t got = socket.read_some(buffer, deadline);
      if (got == 0) break;
      in.append(buffer.data(), got);
      while (const auto head = parse_head(in)) {
        if (head->status == 0) fail(Kind::Io, to_text(to), " gave an answer without a length");
        const size_t end = head->bytes + head->body_bytes;
        if (in.size() < end) break;
        const std::string_view body = std::string_view(in).substr(head->bytes, head->body_bytes);
        on_answer({.status = head->status, .body = body, .done = now()});
        in.erase(0, end);
        ++came;
      }
    }
  } catch (const Error& error) {
    if (error.kind() != Kind::Timeout) throw;
  }
  return came;
}

std::string get(const net::Address& from, const std::string& path, const std::string& headers) {
  const Time deadline = now() + std::chrono::seconds(10);
  auto socket = net::Socket::connect(from, deadline);
  socket.write_all(cat("GET ", path, " HTTP/1.1\r\nHost: ", from.host, "\r\nConnection: close\r\n",
                       headers, "\r\n"),
                   deadline);
  std::string text;
  std::array<char, 65536> buffer;
  while (const size_t got = socket.read_some(buffer, deadline)) text.append(buffer.data(), got);
  const auto head = parse_head(text);
  if (!head || head->status != 200)
    fail(Kind::Io, "GET http://", net::to_text(from), path, " was answered by '",
         text.substr(0, 200), "'; wanted status 200");
  return text.substr(head->bytes);
}

}  // namespace yoke::serve
