// SPDX-License-Identifier: Apache-2.0
// Keys and values that all processes of a run see: where they find each other before they can talk.
// Every wait has a deadline. Threads: all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "yoke/base/clock.h"

namespace yoke::comm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key to be set. Throws Kind::Timeout with the key's name.
  virtual std::string get(const std::string& key, Duration timeout) = 0;
  // Adds to a number that starts at 0, and gives the new value.
  virtual int64_t add(const std::string& key, int64_t by) = 0;
  virtual bool has(const std::string& key) = 0;
};

// For the threads of one process.
std::shared_ptr<Store> make_memory_store();

struct TcpStore {
  std::shared_ptr<Store> store;
  uint16_t port;  // the one that was bound; to be published
};
// LibTorch's TCPStore. The server binds first (port 0: any free one) and says where it listens.
TcpStore serve_tcp_store(uint16_t port, Duration timeout);
std::shared_ptr<Store> connect_tcp_store(const std::string& host, uint16_t port, Duration timeout);

}  // namespace yoke::comm
