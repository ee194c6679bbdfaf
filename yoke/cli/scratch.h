// SPDX-License-Identifier: Apache-2.0
// A temporary folder that goes away with its owner.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "yoke/base/error.h"

namespace yoke::cli {

class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "yoke-bench-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      fail(Kind::Io, "cannot make a folder in ", std::filesystem::temp_directory_path().string());
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace yoke::cli
