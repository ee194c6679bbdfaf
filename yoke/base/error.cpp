// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/error.h"

namespace yoke {

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::Usage:
      return "usage";
    case Kind::Config:
      return "config";
    case Kind::Io:
      return "io";
    case Kind::Comm:
      return "comm";
    case Kind::Device:
      return "device";
    case Kind::Timeout:
      return "timeout";
    case Kind::Cancelled:
      return "cancelled";
    case Kind::Internal:
      return "internal";
  }
  return "unknown";
}

int exit_code(Kind kind) {
  switch (kind) {
    case Kind::Usage:
    case Kind::Config:
      return 2;
    case Kind::Comm:
    case Kind::Device:
    case Kind::Timeout:
      return 3;
    default:
      return 1;
  }
}

}  // namespace yoke
