// SPDX-License-Identifier: Apache-2.0
// What a model takes and gives: names, types and shapes, as the Open Inference Protocol calls them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace yoke::models {

struct Port {
  std::string name = {};
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};  // -1: any size; the first is the number of samples

  std::string text() const;  // "x:FP32[-1,3,224,224]"
  // Throws Kind::Usage with what was got and wanted; `who` begins the text.
  void check(const at::Tensor& value, const std::string& who) const;
};
// The other way round; throws Kind::Usage.
Port parse_port(const std::string& text);
std::string type_name(at::ScalarType type);  // "FP32"

}  // namespace yoke::models
