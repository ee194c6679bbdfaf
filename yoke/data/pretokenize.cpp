// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "yoke/base/error.h"

namespace yoke::data {
namespace {

// Oniguruma's \s is Unicode's White_Space; PCRE2 has U+180E in it as well.
std::string with_its_spaces(const std::string& pattern) {
  const std::string spaces = "\\p{Z}\\x09-\\x0d\\x{85}";
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 's')
        out += in_class ? spaces : "[" + spaces + "]";
      else if (next == 'S' && !in_class)
        out += "[^" + spaces + "]";
      else
        out += {c, next};
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

std::string message_of(int code) {
  PCRE2_UCHAR text[200];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

struct MatchData {
  explicit MatchData(const pcre2_code* code)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)) {}
  ~MatchData() { pcre2_match_data_free(data); }
  MatchData(const MatchData&) = delete;
  MatchData& operator=(const MatchData&) = delete;
  pcre2_match_data* const data;
};

}  // namespace

struct Splitter::Code {
  explicit Code(pcre2_code* code) : pattern(code) {}
  ~Code() { pcre2_code_free(pattern); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  pcre2_code* const pattern;
};

Splitter::Splitter(const std::string& pattern, const std::string& where) {
  const std::string ours = with_its_spaces(pattern);
  int code = 0;
  size_t offset = 0;
  pcre2_code* compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(ours.data()), ours.size(),
                                       PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_UTF_CHECK,
                                       &code, &offset, nullptr);
  if (compiled == nullptr)
    fail(Kind::Io, "'", where, "': the pattern '", pattern, "' cannot be read: ", message_of(code));
  pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);  // without it, it is slower
  code_ = std::make_shared<const Code>(compiled);
}

void Splitter::split(std::string_view text, const Part& part) const {
  const MatchData match(code_->pattern);
  const size_t* range = pcre2_get_ovector_pointer(match.data);
  const auto* bytes = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t begin = 0;  // of what has not been handed out
  for (size_t from = 0; from < text.size();) {
    int result = pcre2_match(code_->pattern, bytes, text.size(), from, PCRE2_NO_UTF_CHECK,
                             match.data, nullptr);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter has the heap
      result = pcre2_match(code_->pattern, bytes, text.size(), from,
                           PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match.data, nullptr);
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0)
      fail(Kind::Io, "cutting a text of ", text.size(), " bytes into words failed at byte ", from,
           ": ", message_of(result));
    if (range[0] > begin) part(text.substr(begin, range[0] - begin), false);
    if (range[1] > range[0]) part(text.substr(range[0], range[1] - range[0]), true);
    begin = from = range[1];
    if (range[1] == range[0])  // an empty match: go on one character further
      while (++from < text.size() && (text[from] & 0xc0) == 0x80) continue;
  }
  if (begin < text.size()) part(text.substr(begin), false);
}

}  // namespace yoke::data
