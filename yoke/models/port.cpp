// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/port.h"

#include <algorithm>
#include <array>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::models {
namespace {

constexpr std::array<std::pair<at::ScalarType, const char*>, 13> kTypes{{{at::kBool, "BOOL"},
                                                                         {at::kByte, "UINT8"},
                                                                         {at::kUInt16, "UINT16"},
                                                                         {at::kUInt32, "UINT32"},
                                                                         {at::kUInt64, "UINT64"},
                                                                         {at::kChar, "INT8"},
                                                                         {at::kShort, "INT16"},
                                                                         {at::kInt, "INT32"},
                                                                         {at::kLong, "INT64"},
                                                                         {at::kHalf, "FP16"},
                                                                         {at::kFloat, "FP32"},
                                                                         {at::kDouble, "FP64"},
                                                                         {at::kBFloat16, "BF16"}}};

std::string text_of(at::ScalarType dtype, const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return cat(type_name(dtype), "[", join(sizes, ","), "]");
}

}  // namespace

std::string type_name(at::ScalarType type) {
  for (const auto& [known, name] : kTypes)
    if (known == type) return name;
  return c10::toString(type);
}

std::string Port::text() const { return cat(name, ":", text_of(dtype, shape)); }

void Port::check(const at::Tensor& value, const std::string& who) const {
  bool fits = value.scalar_type() == dtype && value.dim() == int64_t(shape.size());
  for (size_t d = 0; fits && d < shape.size(); ++d)
    fits = shape[d] < 0 || shape[d] == value.size(int64_t(d));
  if (!fits)
    fail(Kind::Usage, who, ": input '", name, "' wants ", text_of(dtype, shape), ", got ",
         text_of(value.scalar_type(), value.sizes().vec()));
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
  const auto known =
      std::ranges::find_if(kTypes, [&](const auto& one) { return type == one.second; });
  if (known == kTypes.end()) bad(cat("there is no type '", type, "'"));
  port.dtype = known->first;
  const std::string sizes = text.substr(open + 1, text.size() - open - 2);
  for (const auto& word : sizes.empty() ? std::vector<std::string>() : split(sizes, ',')) {
    const auto size = parse_int(word);
    if (!size || *size < -1 || *size == 0) bad(cat("'", word, "' is no size"));
    port.shape.push_back(*size);
  }
  return port;
}

}  // namespace yoke::models
