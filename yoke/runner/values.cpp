// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/values.h"

#include <ATen/core/List.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/models/port.h"

namespace yoke::runner {
namespace {

void add_parts(const c10::IValue& value, const std::vector<std::string>& names, Values& parts) {
  if (value.isTensor() || is_strings(value)) {
    parts.push_back(value);
  } else if (value.isTuple()) {
    for (const auto& part : value.toTupleRef().elements()) add_parts(part, names, parts);
  } else if (value.isList()) {
    for (const c10::IValue& part : value.toList()) add_parts(part, names, parts);
  } else if (value.isGenericDict()) {
    const auto dictionary = value.toGenericDict();
    for (const auto& name : names.empty() ? keys_of(value) : names) {
      const auto found = dictionary.find(name);
      if (found == dictionary.end())
        fail(Kind::Usage, "the model gave no '", name, "'; it gave ", join(keys_of(value), ", "));
      add_parts(found->value(), names, parts);
    }
  } else {
    fail(Kind::Usage, "the model gives ", value.tagKind(),
         "; wanted tensors, or lists of strings, or tuples, lists or dictionaries of them");
  }
}

}  // namespace

c10::IValue as_value(const serve::TensorView& view) {
  if (view.type != plan::Type::Bytes)
    return at::from_blob(view.data, view.shape, models::dtype_of(view.type));
  c10::List<std::string> strings;
  for (size_t at = 0; at + sizeof(uint32_t) <= view.bytes;) {
    uint32_t size = 0;
    std::memcpy(&size, view.data + at, sizeof(size));
    at += sizeof(size);
    if (size > view.bytes - at) fail(Kind::Usage, "a string is longer than what was sent");
    strings.emplace_back(reinterpret_cast<const char*>(view.data + at), size);
    at += size;
  }
  return strings;
}

bool is_strings(const c10::IValue& value) {
  return value.isList() && value.toList().elementType()->kind() == c10::TypeKind::StringType;
}

std::vector<std::string> keys_of(const c10::IValue& result) {
  std::vector<std::string> keys;
  if (result.isGenericDict())
    for (const auto& item : result.toGenericDict()) keys.push_back(item.key().toStringRef());
  return keys;
}

Values flatten(const c10::IValue& result, const std::vector<std::string>& names) {
  if (result.isTensor()) return {result};
  Values parts;
  add_parts(result, names, parts);
  return parts;
}

void give_strings(const c10::IValue& strings, serve::Outputs& outputs) {
  const auto list = strings.toListRef();
  size_t bytes = 0;
  for (const auto& item : list) bytes += sizeof(uint32_t) + item.toStringRef().size();
  std::byte* to = outputs.add(plan::Type::Bytes, {int64_t(list.size())}, bytes).data();
  for (const auto& item : list) {
    const std::string& text = item.toStringRef();
    const auto size = uint32_t(text.size());
    std::memcpy(to, &size, sizeof(size));
    std::memcpy(to + sizeof(size), text.data(), size);
    to += sizeof(size) + size;
  }
}

plan::Type type_of(const c10::IValue& value) {
  return value.isTensor() ? models::type_of(value.toTensor().scalar_type()) : plan::Type::Bytes;
}

plan::Shape shape_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().sizes().vec()
                          : plan::Shape{int64_t(value.toListRef().size())};
}

}  // namespace yoke::runner
