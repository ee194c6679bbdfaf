// SPDX-License-Identifier: Apache-2.0
// A host and a port, and their text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace yoke::net {

struct Address {
  std::string host =
      {};             // a name, or an IPv4 or IPv6 number; empty: every interface (to listen on)
  uint16_t port = 0;  // 0: the system chooses (to listen on)
  bool operator==(const Address&) const = default;
};

// "n1:8080", "127.0.0.1:0", "[::1]:8080", ":8080". Throws Kind::Usage.
Address parse_address(std::string_view text);
std::string to_text(const Address& address);

}  // namespace yoke::net
