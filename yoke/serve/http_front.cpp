// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/http_front.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <cstring>

#include "yoke/base/error.h"
#include "yoke/net/address.h"
#include "yoke/net/socket.h"
#include "yoke/serve/http_connection.h"

namespace yoke::serve {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using Failure = boost::system::error_code;

// One that goes may be the last to have kept another.
std::vector<std::shared_ptr<HttpPeer>> hold_peers(const HttpLane& lane) {
  std::vector<std::shared_ptr<HttpPeer>> held;
  for (auto* peer : lane.peers)
    if (auto one = peer->hold()) held.push_back(std::move(one));
  return held;
}

}  // namespace

struct HttpFront::Impl {
  HttpShared shared;
  std::optional<asio::ssl::context> tls = {};
  std::vector<std::unique_ptr<HttpLane>> lanes = {};
  std::optional<tcp::acceptor> acceptor = {};
  std::optional<asio::posix::stream_descriptor> pool = {};  // its events, where it has no thread
  asio::steady_timer again{lanes_first()};
  std::string address = {};
  size_t next = 0;

  asio::io_context& lanes_first() {
    for (int i = 0; i < std::max(shared.options.threads, 1); ++i)
      lanes.push_back(std::make_unique<HttpLane>());
    return lanes[0]->context;
  }

  Impl(Service& service, const HttpOptions& options) : shared{service, options} {
    if (!options.tls_cert.empty()) {
      tls.emplace(asio::ssl::context::tls_server);
      Failure failure;
      tls->set_options(asio::ssl::context::default_workarounds | asio::ssl::context::no_tlsv1 |
                       asio::ssl::context::no_tlsv1_1);
      const auto check = [&](const char* key, const std::string& file, const char* wanted) {
        if (!failure) return;
        fail(Kind::Config, key, ": cannot use '", file,
             "': ", ::access(file.c_str(), R_OK) == 0 ? failure.message() : std::strerror(errno),
             "; wanted ", wanted);
      };
      tls->use_certificate_chain_file(options.tls_cert, failure);
      check("serve.tls_cert", options.tls_cert, "a PEM file of certificates");
      tls->use_private_key_file(options.tls_key, asio::ssl::context::pem, failure);
      check("serve.tls_key", options.tls_key, "the PEM file of that certificate's key");
    }
    listen();
    if (const int file = shared.service.pool().watch_file(); file >= 0) {
      pool.emplace(lanes[0]->context, ::fcntl(file, F_DUPFD_CLOEXEC, 0));
      watch();
    }
    for (auto& lane : lanes) {
      sweep(*lane);
      lane->thread = std::jthread([&lane = *lane, &service = shared.service] {
        while (!lane.context.stopped()) try {
            lane.context.run();
          } catch (const std::exception& error) {  // of one request; the others go on
            service.log_refused({Status::Internal, error.what()}, {}, "http");
          }
      });
    }
  }

  ~Impl() {
    shared.errands.close();
    // Clients that are left lose their answers; the service must not keep any of ours.
    const Time deadline = SteadyClock().now() + std::chrono::seconds(2);
    for (auto& lane : lanes)
      asio::post(lane->context, [&lane = *lane] {
        for (const auto& peer : hold_peers(lane)) peer->abandon();
      });
    while (shared.connections > 0 && SteadyClock().now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const bool all_gone = shared.connections == 0;
    for (auto& lane : lanes) {
      lane->context.stop();
      lane->thread.join();
      if (!all_gone) (void)lane.release();  // someone holds a connection still
    }
  }

  void listen() {
    const auto wanted = net::parse_address(shared.options.address);
    Failure failure;
    tcp::resolver resolver(lanes[0]->context);
    const std::string host = wanted.host.empty() ? "0.0.0.0" : wanted.host;
    const auto found =
        resolver.resolve(host, std::to_string(wanted.port), tcp::resolver::passive, failure);
    const auto refuse = [&] {
      fail(Kind::Config, "cannot listen on ", shared.options.address, ": ", failure.message(),
           "; choose another by serve.http=127.0.0.1:0");
    };
    if (failure) refuse();
    const tcp::endpoint endpoint = *found.begin();
    acceptor.emplace(lanes[0]->context);
    acceptor->open(endpoint.protocol(), failure);
    acceptor->set_option(tcp::acceptor::reuse_address(true), failure);
    acceptor->bind(endpoint, failure);
    if (failure) refuse();
    acceptor->listen(asio::socket_base::max_listen_connections, failure);
    if (failure) refuse();
    address = net::to_text(
        {wanted.host.empty() ? "0.0.0.0" : wanted.host, acceptor->local_endpoint().port()});
    accept();
  }

  void accept() {
    auto& lane = *lanes[next++ % lanes.size()];
    acceptor->async_accept(lane.context, [this, &lane](Failure failure, tcp::socket socket) {
      if (failure == asio::error::operation_aborted) return;
      if (!failure)
        asio::post(lane.context, [this, &lane, socket = std::move(socket)]() mutable {
          start_connection(shared, lane, std::move(socket), tls ? &*tls : nullptr);
        });
      if (failure) return accept_later();
      accept_if_room();
    });
  }
  // Further clients wait in the system's queue.
  void accept_if_room() {
    if (!acceptor->is_open()) return;
    shared.full = shared.connections >= shared.options.max_connections || !has_spare_files();
    if (!shared.full) return accept();
    accept_later();
  }
  // For workers that start again, and whatever else is opened.
  bool has_spare_files() {
    constexpr rlim_t kSpare = 64;
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const net::Descriptor lowest(::fcntl(acceptor->native_handle(), F_DUPFD_CLOEXEC, 0));
    return lowest && rlim_t(lowest.get()) + kSpare < limit.rlim_cur;
  }
  void accept_later() {
    again.expires_after(std::chrono::milliseconds(10));
    again.async_wait([this](Failure cancelled) {
      if (!cancelled) accept_if_room();
    });
  }

  void watch() {
    pool->async_wait(asio::posix::stream_descriptor::wait_read, [this](Failure failure) {
      if (failure) return;
      shared.service.pool().watch_once();
      watch();
    });
  }

  void sweep(HttpLane& lane) {
    lane.sweep.expires_after(std::chrono::milliseconds(shared.closing ? 10 : 500));
    lane.sweep.async_wait([this, &lane](Failure failure) {
      if (failure) return;
      const Time now = SteadyClock().now();
      for (const auto& peer : hold_peers(lane)) peer->look(now);
      sweep(lane);
    });
  }
};

HttpFront::HttpFront(Service& service, const HttpOptions& options)
    : impl_(std::make_unique<Impl>(service, options)) {}
HttpFront::~HttpFront() = default;
std::string HttpFront::address() const { return impl_->address; }

void HttpFront::shut_down(Time deadline) {
  auto& impl = *impl_;
  impl.shared.closing = true;
  asio::post(impl.lanes[0]->context, [&impl] {
    Failure ignored;
    impl.acceptor->close(ignored);
  });
  // Who is in the middle of asking is told so, if it does not take long.
  const Time patience = std::min<Time>(deadline, SteadyClock().now() + std::chrono::seconds(1));
  const auto waits = [&](Time now) {
    return (impl.shared.unwritten > 0 && now < deadline) ||
           (impl.shared.unread > 0 && now < patience);
  };
  while (waits(SteadyClock().now())) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace yoke::serve
