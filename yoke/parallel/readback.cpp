// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/readback.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace yoke::parallel {

Readback::Readback(const at::Tensor& numbers)
    : host_(numbers.to(at::kCPU, at::kDouble, /*non_blocking=*/true)) {
  if (numbers.is_cpu()) return;
  written_ = std::make_shared<c10::Event>(numbers.device().type());
  written_->record(
      c10::impl::VirtualGuardImpl(numbers.device().type()).getStream(numbers.device()));
}

double Readback::operator[](int64_t i) const {
  if (written_) written_->synchronize();
  return host_.const_data_ptr<double>()[i];
}

}  // namespace yoke::parallel
