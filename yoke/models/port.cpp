// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/port.h"

#include <algorithm>
#include <array>

#include "yoke/base/error.h"

namespace yoke::models {
namespace {

constexpr std::array kDtypes{at::kBool,  at::kByte,   at::kUInt16,  at::kUInt32, at::kUInt64,
                             at::kChar,  at::kShort,  at::kInt,     at::kLong,   at::kHalf,
                             at::kFloat, at::kDouble, at::kBFloat16};  // as plan::Type's

}  // namespace

Port port(std::string name, plan::Type type, const std::vector<int64_t>& sizes) {
  Port result{.name = std::move(name), .type = type};
  for (const int64_t size : sizes)
    result.shape.push_back(size < 0 ? plan::Size{} : plan::Size{size, size});
  return result;
}

at::ScalarType dtype_of(plan::Type type) {
  if (size_t(type) >= kDtypes.size())
    fail(Kind::Usage, "there are no tensors of ", plan::type_name(type));
  return kDtypes[size_t(type)];
}

plan::Type type_of(at::ScalarType dtype) {
  const auto* const found = std::ranges::find(kDtypes, dtype);
  if (found == kDtypes.end())
    fail(Kind::Usage, "a tensor of ", c10::toString(dtype), ", which the protocol does not know");
  return plan::Type(found - kDtypes.begin());
}

void check(const Port& port, const at::Tensor& value, const std::string& who) {
  const auto type = type_of(value.scalar_type());
  if (!port.holds(type, value.sizes()))
    fail(Kind::Usage, who, ": input '", port.name, "' wants ", port.wanted(), ", got ",
         plan::to_text(type, value.sizes()));
}

}  // namespace yoke::models
