// SPDX-License-Identifier: Apache-2.0
#include "yoke/checkpoint/safetensors.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"

namespace yoke::checkpoint {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<const char*, at::ScalarType>, 12> kTypes{
    {{"F64", at::kDouble},
     {"F32", at::kFloat},
     {"F16", at::kHalf},
     {"BF16", at::kBFloat16},
     {"I64", at::kLong},
     {"I32", at::kInt},
     {"I16", at::kShort},
     {"I8", at::kChar},
     {"U8", at::kByte},
     {"BOOL", at::kBool},
     {"F8_E4M3", at::kFloat8_e4m3fn},
     {"F8_E5M2", at::kFloat8_e5m2}}};
constexpr uint64_t kMostHeader = 100'000'000;  // as the reference implementation
constexpr size_t kAlign = 8;

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  const auto* known =
      std::ranges::find(kTypes, dtype, [](const auto& type) { return type.second; });
  if (known == kTypes.end()) fail(Kind::Usage, "safetensors files have no ", c10::toString(dtype));
  return known->first;
}

at::ScalarType parse_dtype(const std::string& name) {
  const auto* known =
      std::ranges::find(kTypes, name, [](const auto& type) { return std::string(type.first); });
  if (known == kTypes.end()) fail(Kind::Io, "'", name, "' is not a type that can be read");
  return known->second;
}

void write_safetensors(const Path& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const Strings& metadata) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    YOKE_CHECK(tensor.is_contiguous() && tensor.is_cpu());
    const size_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", dtype_name(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.is_null() ? "{}" : header.dump();
  text.resize((text.size() + kAlign - 1) / kAlign * kAlign, ' ');
  const uint64_t length = text.size();
  DurableFile file(path);
  file.write(&length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) file.write(tensor.const_data_ptr(), tensor.nbytes());
  file.finish();
}

SafetensorsFile::SafetensorsFile(const Path& path)
    : file_(std::make_shared<const MappedFile>(path)) {
  try {
    const size_t all = file_->size();
    uint64_t length = 0;
    if (all < sizeof length) fail(Kind::Io, "it has ", all, " bytes");
    std::memcpy(&length, file_->data(), sizeof length);
    if (length > std::min<uint64_t>(kMostHeader, all - 8))
      fail(Kind::Io, "its header would have ", length, " of ", all, " bytes");
    const char* text = file_->data() + 8;
    const char* data = text + length;
    const size_t room = all - 8 - length;
    const json header = json::parse(text, text + length);
    std::vector<std::pair<size_t, size_t>> ranges;
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = entry.get<Strings>();
        continue;
      }
      const auto dtype = parse_dtype(entry.at("dtype").get<std::string>());
      const auto shape = entry.at("shape").get<std::vector<int64_t>>();
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<size_t, size_t>>();
      size_t bytes = c10::elementSize(dtype);
      for (const int64_t size : shape)
        if (size < 0 || __builtin_mul_overflow(bytes, size_t(size), &bytes))
          fail(Kind::Io, "the shape of '", name, "' cannot be");
      if (begin > end || end > room || end - begin != bytes)
        fail(Kind::Io, "'", name, "' has ", bytes, " bytes, and its place is ", begin, " to ", end,
             " of ", room);
      ranges.emplace_back(begin, end);
      tensors_[name] = bytes == 0 ? at::empty(shape, dtype)
                                  : at::from_blob(
                                        const_cast<char*>(data + begin), shape,
                                        [kept = file_](void*) {}, at::dtype(dtype));
    }
    std::ranges::sort(ranges);
    size_t last = 0;
    for (const auto& [begin, end] : ranges) {
      if (begin != last) fail(Kind::Io, "there is a gap or an overlap at byte ", begin);
      last = end;
    }
    if (last != room) fail(Kind::Io, room - last, " bytes at its end belong to nobody");
  } catch (const std::exception& error) {
    fail(Kind::Io, "'", path.string(), "' is no safetensors file: ", error.what());
  }
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    fail(Kind::Io, "'", file_->path().string(), "' has no tensor '", name, "'");
  return found->second;
}

}  // namespace yoke::checkpoint
