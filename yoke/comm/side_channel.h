// SPDX-License-Identifier: Apache-2.0
// One process's connection to the hub of its world, and the world's store. A thread keeps this
// process's World in step with the others': failures and departures go both ways, what the ranks
// are doing is told ten times a second, and the death of a process ends the world within
// milliseconds on one host, whatever the data goes through. Owns: its thread, the connection.
// Threads: all.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "yoke/comm/frames.h"
#include "yoke/comm/store.h"

namespace yoke::comm {

// Where the hub may be; asked again until it is there. May throw.
struct HubFinder {
  std::function<std::vector<net::Address>()> addresses;
  bool with_process_0 = true;                              // its death is the death of rank 0
  std::function<bool()> cancelled = [] { return false; };  // the wait is given up then
};

class SideChannel final : public Store {
 public:
  // Blocks until every process of the world has come. The hub may be late; it is looked for at each
  // of the addresses until the deadline. Throws Kind::Comm with the hub's reason, or Kind::Timeout.
  static std::shared_ptr<SideChannel> join(const HubFinder& find_hub, const Hello& hello,
                                           Duration timeout);
  ~SideChannel() override;

  // Who met; to make the World from.
  Membership membership();
  // From here on the world hears of the others, and they of it. It must outlive close().
  void attach(World& world);
  // Tells all that is left to tell, and parts. Nothing is heard any more.
  void close();

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Duration timeout) override;
  int64_t add(const std::string& key, int64_t by) override;
  bool has(const std::string& key) override;

 private:
  class Impl;
  explicit SideChannel(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
  std::weak_ptr<SideChannel> self_;
};

}  // namespace yoke::comm
