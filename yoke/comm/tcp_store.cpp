// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/store.h"

namespace yoke::comm {
namespace {

std::chrono::milliseconds milliseconds(Duration timeout) {
  return std::chrono::ceil<std::chrono::milliseconds>(timeout);
}

class TorchTcpStore final : public Store {
 public:
  TorchTcpStore(const std::string& host, uint16_t port, bool serves, Duration timeout)
      : store_(host, options(port, serves, timeout)) {}
  uint16_t port() const { return store_.getPort(); }

  void set(const std::string& key, const std::string& value) override {
    store_.set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::string get(const std::string& key, Duration timeout) override {
    try {
      store_.wait({key}, milliseconds(timeout));
    } catch (const c10::Error&) {
      fail(Kind::Timeout, "nobody set '", key, "' in the store within ", duration_text(timeout));
    }
    const auto bytes = store_.get(key);
    return {bytes.begin(), bytes.end()};
  }

  int64_t add(const std::string& key, int64_t by) override { return store_.add(key, by); }
  bool has(const std::string& key) override { return store_.check({key}); }

 private:
  static c10d::TCPStoreOptions options(uint16_t port, bool serves, Duration timeout) {
    c10d::TCPStoreOptions result;
    result.port = port;
    result.isServer = serves;
    result.waitWorkers = false;
    result.timeout = milliseconds(timeout);
    result.multiTenant = false;
    return result;
  }
  c10d::TCPStore store_;
};

}  // namespace

TcpStore serve_tcp_store(uint16_t port, Duration timeout) {
  try {
    auto store = std::make_shared<TorchTcpStore>("127.0.0.1", port, true, timeout);
    const uint16_t bound = store->port();
    return {std::move(store), bound};
  } catch (const c10::Error& error) {
    fail(Kind::Io, "cannot serve a store on port ", port, ": ", error.what_without_backtrace(),
         "; choose another port, or 0 for any free one");
  }
}

std::shared_ptr<Store> connect_tcp_store(const std::string& host, uint16_t port, Duration timeout) {
  try {
    return std::make_shared<TorchTcpStore>(host, port, false, timeout);
  } catch (const c10::Error& error) {
    fail(Kind::Comm, "cannot reach the store at ", host, ":", port, " within ",
         duration_text(timeout), ": ", error.what_without_backtrace());
  }
}

}  // namespace yoke::comm
