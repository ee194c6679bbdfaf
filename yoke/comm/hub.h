// SPDX-License-Identifier: Apache-2.0
// Where the processes of a world meet and stay connected: it tells each who the others are, keeps
// the store, passes on failures, departures and what every rank is doing, and says so at once when
// a process dies. It lives in one process of the world, or in the one that started them, and is
// no part of the way the data goes. Owns: its thread and sockets. Threads: all.
#pragma once

#include <memory>
#include <optional>

#include "yoke/comm/world.h"
#include "yoke/net/address.h"

namespace yoke::comm {

struct HubOptions {
  int num_processes = 1;
  std::string job = {};                          // who belongs to another job is refused
  std::string where = {};                        // the host as the others know it, for messages
  Duration timeout = std::chrono::seconds(300);  // until all have come
};

class Hub {
 public:
  // Listens from here on. Throws Kind::Io when it cannot.
  Hub(const net::Address& at, const HubOptions& options);
  ~Hub();

  const net::Address& address() const;  // with the real port
  // The first failure that was reported or seen.
  std::optional<World::Failure> failure() const;
  // Waits until every process has gone. After a failure the wait is short: who has not heard of it
  // by then finds the hub gone. Else it lasts as long as the others are connected.
  void wait_until_all_left();

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::comm
