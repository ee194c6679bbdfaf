// SPDX-License-Identifier: Apache-2.0
// A file in memory, read when it is looked at.
#pragma once

#include <cstddef>
#include <filesystem>

namespace yoke {

class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);  // throws Kind::Io
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const char* data() const { return static_cast<const char*>(memory_); }
  size_t size() const { return size_; }

 private:
  const std::filesystem::path path_;
  void* memory_ = nullptr;  // null: it is empty
  size_t size_ = 0;
};

}  // namespace yoke
