// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/address.h"

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::net {

Address parse_address(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    fail(Kind::Usage, "address '", text, "': ", why, "; write host:port, as in 127.0.0.1:8080");
  };
  const size_t colon = text.rfind(':');
  if (colon == text.npos || text.ends_with(']')) refuse("the port is missing");
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
    if (host.find(':') == host.npos) refuse("brackets are for IPv6 numbers");
  } else if (host.find_first_of(":[]") != host.npos) {
    refuse("an IPv6 number goes in brackets, [::1]:8080");
  }
  if (std::ranges::any_of(host, [](unsigned char c) { return c <= ' ' || c == '/'; }))
    refuse("the host has a blank or a slash in it");
  const auto number = parse_int(port);
  if (!number || *number < 0 || *number > 65535 || port.front() == '-')
    refuse(cat("got port '", port, "', wanted 0 to 65535"));
  return {std::string(host), uint16_t(*number)};
}

std::string to_text(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return cat(v6 ? "[" : "", address.host, v6 ? "]" : "", ":", address.port);
}

}  // namespace yoke::net
