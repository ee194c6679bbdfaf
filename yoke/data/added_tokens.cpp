// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/added_tokens.h"

#include <algorithm>

namespace yoke::data {
namespace {

constexpr std::string_view kSpaces =
    " \n\t\r\v\f\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000";

// Where the spaces at the beginning of the UTF-8 text end.
size_t spaces_end(std::string_view text) {
  size_t end = 0;
  while (end < text.size()) {
    size_t next = end + 1;
    while (next < text.size() && (text[next] & 0xc0) == 0x80) ++next;
    if (kSpaces.find(text.substr(end, next - end)) == kSpaces.npos) break;
    end = next;
  }
  return end;
}

// Where those at its end begin.
size_t spaces_begin(std::string_view text) {
  size_t begin = text.size();
  while (begin > 0) {
    size_t before = begin - 1;
    while (before > 0 && (text[before] & 0xc0) == 0x80) --before;
    if (kSpaces.find(text.substr(before, begin - before)) == kSpaces.npos) break;
    begin = before;
  }
  return begin;
}

}  // namespace

void AddedTokens::add(AddedToken added) {
  auto& tokens = tokens_[uint8_t(added.content[0])];
  tokens.push_back(std::move(added));
  std::ranges::stable_sort(tokens, std::greater{}, [](auto& one) { return one.content.size(); });
}

const AddedToken* AddedTokens::find(std::string_view text) const {
  for (const auto& added : tokens_[uint8_t(text[0])])
    if (text.starts_with(added.content)) return &added;
  return nullptr;
}

void AddedTokens::cut(std::string_view text, const std::function<void(int64_t)>& token,
                      const std::function<void(std::string_view)>& between) const {
  size_t begin = 0;  // of what has not been handed out
  for (size_t i = 0; i < text.size();) {
    const AddedToken* found = find(text.substr(i));
    if (found == nullptr) {
      ++i;
      continue;
    }
    const size_t from = found->lstrip ? begin + spaces_begin(text.substr(begin, i - begin)) : i;
    if (from > begin) between(text.substr(begin, from - begin));
    token(found->token);
    i += found->content.size();
    if (found->rstrip) i += spaces_end(text.substr(i));
    begin = i;
  }
  if (begin < text.size()) between(text.substr(begin));
}

}  // namespace yoke::data
