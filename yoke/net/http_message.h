// SPDX-License-Identifier: Apache-2.0
// The bytes of HTTP/1.1 for the server of http.h: from a request's head to its meaning, and from a
// response to its bytes. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "yoke/net/http.h"

namespace yoke::net {

struct ParsedRequest {
  HttpRequest request = {};
  int error = 0;           // the status to answer with when the request is refused, else 0
  bool keep_alive = true;  // false as well after an error: what follows cannot be trusted
};

// The number of bytes up to and with the blank line, once it is there.
std::optional<size_t> head_size(std::string_view received);

ParsedRequest parse_request(std::string_view head);

// The bytes to send; `head_only` leaves the body out but tells its length.
std::string serialize(const HttpResponse& response, bool keep_alive, bool head_only);

// "404 not found\n" and the like.
HttpResponse error_response(int status);

}  // namespace yoke::net
