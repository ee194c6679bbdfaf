// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/work.h"

#include <algorithm>

namespace yoke::comm {
namespace {

class AllWork final : public Work::Impl {
 public:
  explicit AllWork(std::vector<Work> parts) : parts_(std::move(parts)) {}
  void wait() override {
    for (const auto& part : parts_) part.wait();
  }
  void synchronize() override {
    for (const auto& part : parts_) part.synchronize();
  }
  bool done() const override {
    return std::ranges::all_of(parts_, [](const Work& part) { return part.done(); });
  }

 private:
  std::vector<Work> parts_;
};

}  // namespace

Work Work::all(std::vector<Work> parts) {
  return Work(std::make_shared<AllWork>(std::move(parts)));
}

}  // namespace yoke::comm
