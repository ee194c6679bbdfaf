// SPDX-License-Identifier: Apache-2.0
// Numbers that a device may still be computing, on their way to the host: nobody waits for them
// until somebody looks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>

namespace yoke::parallel {

class Readback {
 public:
  Readback() = default;
  explicit Readback(const at::Tensor& numbers);  // [n], float64
  double operator[](int64_t i) const;            // waits for the device
  int64_t size() const { return host_.numel(); }

 private:
  at::Tensor host_;
  std::shared_ptr<c10::Event> written_;  // null: it is
};

}  // namespace yoke::parallel
