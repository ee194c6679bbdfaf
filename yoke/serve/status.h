// SPDX-License-Identifier: Apache-2.0
// How a request ends, whatever the protocol.
#pragma once

#include <string>

#include "yoke/base/error.h"

namespace yoke::serve {

enum class Status {
  Ok,
  Invalid,          // 400: what was sent is wrong
  Unauthenticated,  // 401: no key, or an unknown one
  Forbidden,        // 403: not yours
  NotFound,         // 404
  TooLarge,         // 413
  Exhausted,        // 429: the tenant has too much waiting
  Cancelled,        // 499: the client left or said so
  Internal,         // 500: the model failed
  Unsupported,      // 501
  Unavailable,      // 503: no healthy replica, or the server ends
  Deadline,         // 504: the request's own time limit
};

struct Outcome {
  Status status = Status::Ok;
  std::string text = {};   // what was got and what was wanted
  double retry_after = 0;  // seconds, with Exhausted and Unavailable
  bool ok() const { return status == Status::Ok; }
};

// The way a request is refused inside; fronts turn it into an answer.
struct Refused {
  Outcome outcome;
};
template <typename... Parts>
[[noreturn]] void refuse(Status status, const Parts&... parts) {
  throw Refused{{status, cat(parts...)}};
}

int http_status(Status status);
const char* status_name(Status status);  // "invalid", for logs and metrics

}  // namespace yoke::serve
