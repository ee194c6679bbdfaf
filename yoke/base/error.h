// SPDX-License-Identifier: Apache-2.0
// The one exception of Yoke. Thrown for what ends an operation; what a caller expects and handles
// (queue full, end of data) is a return value instead. A message says what failed, what was got,
// what was wanted and what to do next. YOKE_CHECK is for bugs: always on, never reachable by user
// input.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace yoke {

enum class Kind { Usage, Config, Io, Comm, Device, Timeout, Cancelled, Internal };

const char* to_string(Kind kind);
// What a program ends with: 1 failed, 2 a mistake of the user, 3 a peer or a device failed.
int exit_code(Kind kind);

class Error : public std::runtime_error {
 public:
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

// The parts, written one after the other.
template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void fail(Kind kind, const Parts&... parts) {
  throw Error(kind, cat(parts...));
}

}  // namespace yoke

#define YOKE_CHECK(condition, ...)                                              \
  do {                                                                          \
    if (!(condition))                                                           \
      ::yoke::fail(::yoke::Kind::Internal, __FILE__, ":", __LINE__,             \
                   ": " #condition " failed" __VA_OPT__(, ": ", ) __VA_ARGS__); \
  } while (false)
