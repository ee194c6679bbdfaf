// SPDX-License-Identifier: Apache-2.0
// Tokens that are found in the text as they are written, before anything else is done with it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::data {

struct AddedToken {
  std::string content = {};  // not empty
  int64_t token = 0;
  bool lstrip = false, rstrip = false;  // spaces beside it belong to it
};

class AddedTokens {
 public:
  void add(AddedToken added);
  // The tokens, the leftmost and longest first, and the texts between them, in order, none empty.
  void cut(std::string_view text, const std::function<void(int64_t)>& token,
           const std::function<void(std::string_view)>& between) const;

 private:
  const AddedToken* find(std::string_view text) const;  // that it begins with

  std::array<std::vector<AddedToken>, 256> tokens_;  // by first byte, the longest first
};

}  // namespace yoke::data
