// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/lane.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "yoke/comm/local/cuda_lane.h"

namespace yoke::runner {

Lane::Lane(at::Device device, bool timed) : device_(device) {
  if (!device.is_cuda()) return;
  comm::cuda_enter(std::max<int>(device.index(), 0));
  for (int i = 0; timed && i < kMarks; ++i)
    marks_.emplace_back(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
}

Lane::~Lane() = default;

void Lane::mark(Mark mark) {
  if (!marks_.empty())
    marks_[mark].record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device_));
}

Duration Lane::between(Mark a, Mark b) const {
  const std::chrono::duration<double, std::milli> time(marks_[a].elapsedTime(marks_[b]));
  return std::chrono::duration_cast<Duration>(time);
}

at::Tensor Lane::pinned(std::vector<at::Tensor>& kept, size_t place, at::IntArrayRef sizes,
                        at::ScalarType dtype) {
  if (kept.size() <= place) kept.resize(place + 1);
  const int64_t bytes = c10::multiply_integers(sizes) * int64_t(c10::elementSize(dtype));
  if (!kept[place].defined() || kept[place].numel() < bytes)
    kept[place] = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  return kept[place].narrow(0, 0, bytes).view(dtype).view(sizes);
}

void Lane::wait() {
  c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device_).synchronize();
  reading_.clear();
}

bool Lane::lost() const {
  if (!device_.is_cuda()) return false;
  try {
    c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device_).synchronize();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

at::Tensor Lane::there(size_t place, const at::Tensor& value, int64_t rows, const at::Tensor& to) {
  const bool grows = rows > 0 && value.dim() > 0 && value.size(0) != rows;
  if (!grows && !device_.is_cuda()) return value;
  auto sizes = value.sizes().vec();
  if (grows) sizes[0] = rows;
  if (device_.is_cuda()) {
    if (place < reading_.size() && reading_[place]) wait();  // of a batch that did not come back
    reading_.resize(std::max(reading_.size(), place + 1));
    reading_[place] = true;
  }
  const at::Tensor filled = device_.is_cuda()
                                ? pinned(pinned_in_, place, sizes, value.scalar_type())
                                : at::empty(sizes, value.options());
  if (grows) {
    const int64_t have = value.size(0);
    filled.narrow(0, 0, have).copy_(value);
    filled.narrow(0, have, rows - have)
        .copy_(value.narrow(0, 0, 1).expand_as(filled.narrow(0, have, rows - have)));
  } else {
    filled.copy_(value);
  }
  if (!std::exchange(arriving_, true)) mark(kInBegins);
  auto arrived = to.defined() ? to.copy_(filled, /*non_blocking=*/true)
                              : filled.to(device_, /*non_blocking=*/true);
  mark(kInEnds);
  return arrived;
}

void Lane::back(const std::vector<at::Tensor>& from, const std::vector<std::span<std::byte>>& to) {
  std::vector<at::Tensor> near(from.size());
  bool waits = false;
  for (size_t i = 0; i < from.size(); ++i) {
    near[i] = from[i];
    if (from[i].is_cuda()) {
      if (!waits) mark(kOutBegins);
      near[i] = pinned(pinned_out_, i, from[i].sizes(), from[i].scalar_type());
      near[i].copy_(from[i], /*non_blocking=*/true);
      waits = true;
    }
  }
  if (waits) {
    mark(kOutEnds);
    wait();
  }
  const bool came = std::exchange(arriving_, false);
  if (waits && !marks_.empty()) {
    copies_ = {.out = between(kOutBegins, kOutEnds)};
    if (came)
      copies_.in = between(kInBegins, kInEnds), copies_.whole = between(kInBegins, kOutEnds);
  }
  for (size_t i = 0; i < near.size(); ++i)
    if (!to[i].empty())
      std::memcpy(to[i].data(), near[i].contiguous().const_data_ptr(), to[i].size());
}

}  // namespace yoke::runner
