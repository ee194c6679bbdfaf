// SPDX-License-Identifier: Apache-2.0
// What each launcher says in its environment variables: one reader for each, in the order in which
// discover() believes them. The inside of launch.h; nobody else needs it.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "yoke/topo/launch.h"

namespace yoke::topo::detail {

// The end of many errors.
inline constexpr auto kOverride = "set YOKE_RANK and YOKE_WORLD_SIZE to say which process this is";

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  bool has(const char* name) const { return !text(name).empty(); }
  std::string text(const char* name) const;  // empty when unset: no launcher sets an empty value

  // Nothing when unset. They throw Kind::Usage, with the name, when the value cannot be one.
  std::optional<int> number(const char* name) const;
  std::optional<int> port(const char* name) const;
  std::optional<int> either(const char* name, const char* other) const {
    return has(name) ? number(name) : number(other);
  }

 private:
  const Environment& environment_;
};

// What one launcher says. Its problem is told only if no launcher before it knows better.
struct Claim {
  LaunchInfo info = {};
  std::string rank_name = {}, size_name = {};  // the variables, for errors
  std::string problem = {};
};

using Reading = std::optional<Claim>;
extern const std::array<Reading (*)(const Variables&), 10> kReaders;

// For a process that no launcher numbers.
std::string alone_note(const Variables& env);

// In 10000-28999: below the ephemeral ports, and the same on every process of the job.
int port_of(std::string_view job);

}  // namespace yoke::topo::detail
