// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/port.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

struct Known {
  const char* name;
  size_t size;
};
constexpr std::array<Known, 14> kTypes{{{"BOOL", 1},
                                        {"UINT8", 1},
                                        {"UINT16", 2},
                                        {"UINT32", 4},
                                        {"UINT64", 8},
                                        {"INT8", 1},
                                        {"INT16", 2},
                                        {"INT32", 4},
                                        {"INT64", 8},
                                        {"FP16", 2},
                                        {"FP32", 4},
                                        {"FP64", 8},
                                        {"BF16", 2},
                                        {"BYTES", 0}}};  // as Type's

std::string text_of(const Size& size) {
  if (!size.name.empty()) return size.name;
  if (size == Size{}) return "-1";
  return size.fixed() ? cat(size.least) : cat(size.least, "..", size.most);
}

bool is_name(const std::string& word) {
  const auto letter = [](unsigned char c) { return std::isalpha(c) || c == '_'; };
  return !word.empty() && letter(word[0]) &&
         std::ranges::all_of(word, [&](unsigned char c) { return letter(c) || std::isdigit(c); });
}

}  // namespace

const char* type_name(Type type) { return kTypes[size_t(type)].name; }

std::optional<Type> find_type(std::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i)
    if (name == kTypes[i].name) return Type(i);
  return std::nullopt;
}

size_t size_of(Type type) { return kTypes[size_t(type)].size; }

std::optional<int64_t> num_elements(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return std::nullopt;
  return count;
}

std::string to_text(Type type, std::span<const int64_t> shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return cat(type_name(type), "[", join(sizes, ","), "]");
}

std::string Port::wanted() const {
  std::vector<std::string> sizes;
  for (const auto& size : shape) sizes.push_back(text_of(size));
  return cat(type_name(type), "[", join(sizes, ","), "]");
}

std::string Port::text() const { return cat(name, ":", wanted()); }

Shape Port::sizes() const {
  Shape result;
  for (const auto& size : shape) result.push_back(size.fixed() ? size.least : -1);
  return result;
}

bool Port::holds(Type got, std::span<const int64_t> sizes) const {
  return got == type && std::ranges::equal(sizes, shape, [](int64_t size, const Size& wanted) {
           return wanted.holds(size);
         });
}

Port parse_port(const std::string& text) {
  const auto bad = [&](const std::string& why) {
    fail(Kind::Usage, "'", text, "' is no port: ", why, "; one is x:FP32[-1,3,224,224]");
  };
  const size_t colon = text.find(':'), open = text.find('[');
  if (colon == text.npos || colon == 0 || open == text.npos || open < colon || text.back() != ']')
    bad("it wants NAME:TYPE[SIZES]");
  Port port{.name = text.substr(0, colon)};
  const std::string type = text.substr(colon + 1, open - colon - 1);
  const auto known = find_type(type);
  if (!known) bad(cat("there is no type '", type, "'"));
  port.type = *known;
  const std::string sizes = text.substr(open + 1, text.size() - open - 2);
  for (const auto& word : sizes.empty() ? std::vector<std::string>() : split(sizes, ',')) {
    const size_t dots = word.find("..");
    const auto least = parse_int(word.substr(0, dots));
    const auto most = dots == word.npos ? least : parse_int(word.substr(dots + 2));
    if (least == -1 && dots == word.npos)
      port.shape.push_back({});
    else if (is_name(word))
      port.shape.push_back({.name = word});
    else if (least && most && *least >= (dots == word.npos ? 1 : 0) && *most >= *least)
      port.shape.push_back({.least = *least, .most = *most});
    else
      bad(cat("'", word, "' is no size"));
  }
  return port;
}

}  // namespace yoke::plan
