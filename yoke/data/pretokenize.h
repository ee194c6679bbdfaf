// SPDX-License-Identifier: Apache-2.0
// Cuts text by a regular expression, written for Oniguruma, as tokenizer.json has it. What a letter
// is, PCRE2 says: version 10.42 knows those up to Unicode 14.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace yoke::data {

class Splitter {
 public:
  using Part = std::function<void(std::string_view part, bool is_match)>;
  // Throws Kind::Io, naming `where`, for a pattern that is none.
  Splitter(const std::string& pattern, const std::string& where);
  // Every match and every text between two, in order, none empty. The text must be UTF-8: see
  // valid_utf8.
  void split(std::string_view text, const Part& part) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace yoke::data
