// SPDX-License-Identifier: Apache-2.0
// What HTTP alone costs: a server on Boost.Beast that reads a request and answers so many bytes. An
// io_context for each thread, each with its own listener on the one port.
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/cli/bench_serve.h"

namespace yoke::cli {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using ReusePort = asio::detail::socket_option::boolean<SOL_SOCKET, SO_REUSEPORT>;

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, const std::string& body)
      : socket_(std::move(socket)), answer_(http::status::ok, 11) {
    socket_.set_option(tcp::no_delay(true));
    answer_.set(http::field::content_type, "application/json");
    answer_.body() = beast::span<const char>(body.data(), body.size());
    answer_.prepare_payload();
  }
  void read() {
    request_ = {};
    http::async_read(socket_, buffer_, request_, [self = shared_from_this()](auto error, size_t) {
      if (!error) self->write();
    });
  }

 private:
  void write() {
    http::async_write(socket_, answer_, [self = shared_from_this()](auto error, size_t) {
      if (!error) self->read();
    });
  }

  tcp::socket socket_;
  beast::flat_buffer buffer_;
  http::request<http::string_body> request_;
  http::response<http::span_body<const char>> answer_;
};

struct Port {
  explicit Port(uint16_t number) {
    acceptor.open(tcp::v4());
    acceptor.set_option(tcp::acceptor::reuse_address(true));
    acceptor.set_option(ReusePort(true));
    acceptor.bind({asio::ip::make_address("127.0.0.1"), number});
    acceptor.listen();
  }
  void accept(const std::string& body) {
    acceptor.async_accept([&](auto error, tcp::socket socket) {
      if (!error) std::make_shared<Session>(std::move(socket), body)->read();
      accept(body);
    });
  }
  asio::io_context context{1};
  tcp::acceptor acceptor{context};
};

}  // namespace

void run_echo(const std::string& port_file, size_t bytes, int num_threads) {
  const std::string body(bytes, 'x');
  std::vector<std::unique_ptr<Port>> ports;
  for (int i = 0; i < num_threads; ++i) {
    ports.push_back(
        std::make_unique<Port>(i == 0 ? uint16_t(0) : ports[0]->acceptor.local_endpoint().port()));
    ports.back()->accept(body);
  }
  const std::string unfinished = port_file + ".new";
  std::ofstream(unfinished) << "{\"http\":\"127.0.0.1:"
                            << ports[0]->acceptor.local_endpoint().port() << "\"}\n";
  std::filesystem::rename(unfinished, port_file);
  asio::signal_set signals(ports[0]->context, SIGTERM, SIGINT);
  signals.async_wait([&](auto, int) {
    for (const auto& port : ports) port->context.stop();
  });
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < ports.size(); ++i)
    threads.emplace_back([&, i] { ports[i]->context.run(); });
  ports[0]->context.run();
}

}  // namespace yoke::cli
