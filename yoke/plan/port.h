// SPDX-License-Identifier: Apache-2.0
// What a model takes and gives, without LibTorch: names, datatypes and shapes as the Open Inference
// Protocol calls them. The text of one is "x:FP32[-1,3,32..256,32..256]", or "x:FP32[b,4]" where a
// size has a name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::plan {

enum class Type : uint8_t {
  Bool,
  Uint8,
  Uint16,
  Uint32,
  Uint64,
  Int8,
  Int16,
  Int32,
  Int64,
  Fp16,
  Fp32,
  Fp64,
  Bf16,
  Bytes,  // each element a length (32 bits, little endian) and that many bytes
};
const char* type_name(Type type);  // "FP32"
std::optional<Type> find_type(std::string_view name);
size_t size_of(Type type);  // bytes of an element; 0 for Bytes

using Shape = std::vector<int64_t>;
// Nothing where it does not fit into 63 bits, or a size is negative.
std::optional<int64_t> num_elements(std::span<const int64_t> shape);
std::string to_text(Type type, std::span<const int64_t> shape);  // "FP32[2,3]"

struct Size {
  int64_t least = 0, most = INT64_MAX;
  std::string name = {};  // those of one name are equal within a model
  bool holds(int64_t size) const { return size >= least && size <= most; }
  bool fixed() const { return least == most; }
  bool operator==(const Size&) const = default;
};

struct Port {
  std::string name = {};
  Type type = Type::Fp32;
  std::vector<Size> shape = {};
  bool operator==(const Port&) const = default;

  std::string text() const;    // with its name
  std::string wanted() const;  // without
  Shape sizes() const;         // -1 where it varies
  // Whether the first size is of any number of samples.
  bool has_rows() const { return !shape.empty() && !shape[0].fixed(); }
  bool holds(Type type, std::span<const int64_t> sizes) const;
};
Port parse_port(const std::string& text);  // throws Kind::Usage

}  // namespace yoke::plan
