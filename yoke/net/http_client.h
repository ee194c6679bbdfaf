// SPDX-License-Identifier: Apache-2.0
// One question over HTTP/1.1, for a program that asks a server what it is doing: a connection for
// each, no redirects. An answer of any status is an answer; what is not one is thrown:
// Kind::Usage for a URL or a header that cannot be sent, Kind::Io, and Kind::Timeout at the
// deadline.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "yoke/net/http.h"

namespace yoke::net {

// "http://127.0.0.1:8000/v2", "[::1]:8000", "https://n1"; the port is 80, or 443, where there is
// none. An answer of more than `max_bytes`, its head with it, is Kind::Io. A `ca_file` is
// TlsSocket's.
HttpResponse http_get(const std::string& url,
                      const std::vector<std::pair<std::string, std::string>>& headers,
                      Time deadline, size_t max_bytes = 64 << 20, const std::string& ca_file = {});

}  // namespace yoke::net
