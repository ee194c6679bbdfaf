// SPDX-License-Identifier: Apache-2.0
// The safetensors format: eight bytes with the length of a JSON header, the header, then the bytes
// of the tensors without gaps. What is read is checked before it is believed.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "yoke/base/mapped_file.h"
#include "yoke/checkpoint/files.h"

namespace yoke::checkpoint {

using Strings = std::map<std::string, std::string>;

std::string dtype_name(
    at::ScalarType dtype);  // "F32"; throws Kind::Usage where the format has none
at::ScalarType parse_dtype(const std::string& name);

// Contiguous tensors on the CPU. On the disk when it returns.
void write_safetensors(const Path& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const Strings& metadata = {});

// Owns: a mapping of the file. Throws Kind::Io where it is not what the format says.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const Path& path);

  const Strings& metadata() const { return metadata_; }
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return tensors_.contains(name); }
  // Of the file's own memory: to be read only.
  at::Tensor tensor(const std::string& name) const;

 private:
  const std::shared_ptr<const MappedFile> file_;  // its tensors keep it
  Strings metadata_;
  std::map<std::string, at::Tensor> tensors_;
};

}  // namespace yoke::checkpoint
