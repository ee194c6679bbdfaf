// SPDX-License-Identifier: Apache-2.0
// From a host's name to its numbers, with a deadline (to the second: the resolver counts in them).
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/net/address.h"

namespace yoke::net {

struct Endpoint {
  sockaddr_storage storage = {};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

enum class Purpose { Connect, Listen };

// At least one, in the resolver's order. Throws Kind::Io for an unknown name, Kind::Timeout.
std::vector<Endpoint> resolve(const Address& address, Purpose purpose, Time deadline);

// The IPv4 numbers of this host's interfaces that are up, loopback last.
std::vector<std::string> own_hosts();

std::string to_text(const Endpoint& endpoint);  // "127.0.0.1:8080"
uint16_t port_of(const Endpoint& endpoint);

}  // namespace yoke::net
