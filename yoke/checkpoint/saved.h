// SPDX-License-Identifier: Apache-2.0
// A checkpoint that was committed. Reading takes from the saved boxes what they have in common with
// the wanted ones, so it does not matter who saved which. Errors are Kind::Io with file and tensor.
// Threads: one each.
#pragma once

#include <memory>
#include <optional>

#include "yoke/checkpoint/piece.h"

namespace yoke::checkpoint {

constexpr const char* kIndexName = "index.json";

std::string step_name(int64_t step);  // "step-00000100"
// The committed ones in a folder, oldest first; none if it is not there.
std::vector<Path> list(const Path& folder);
std::optional<Path> latest(const Path& folder);
// `path` itself if it is one, else those in it, or in a run's folder of them, oldest first. Throws
// Kind::Usage where there are none.
std::vector<Path> find(const Path& path);

class Saved {
 public:
  explicit Saved(const Path& folder);
  ~Saved();
  Saved(Saved&&) noexcept;

  struct Stored {
    plan::Box box = {};
    std::string file = {}, key = {};
    uint32_t crc32c = 0;
  };
  struct Tensor {
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> shape = {};
    std::vector<Stored> boxes = {};
    int64_t bytes() const;
  };
  int64_t step() const { return step_; }
  const Strings& values() const { return values_; }
  // Throws with what is there if it is not.
  const std::string& value(const std::string& name) const;
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }

  // Fills the values of the pieces; converts where the types differ.
  void read(const std::vector<Piece>& wanted) const;
  at::Tensor whole(const std::string& name) const;
  // Every box of every tensor against its checksum, and whether they have all of it; one line for
  // each thing that is wrong.
  std::vector<std::string> verify() const;

 private:
  const SafetensorsFile& file(const std::string& name) const;

  Path folder_;
  int64_t step_ = 0;
  Strings values_;
  std::map<std::string, Tensor> tensors_;
  mutable std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
};

}  // namespace yoke::checkpoint
