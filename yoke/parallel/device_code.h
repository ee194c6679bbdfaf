// SPDX-License-Identifier: Apache-2.0
// CUDA kernels that are compiled when a GPU wants them, by the NVRTC that LibTorch brings: the
// program is built without a CUDA compiler, and without CUDA at all. Where it cannot be had the
// caller computes with LibTorch's own operations.
// Threads: any.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace yoke::parallel {

class DeviceCode {
 public:
  // Kernels of `source` are extern "C", with literal names. It has the types Bf16 and Fp16, with
  // to_float(x) and put(to, float), and Vector<T, N> (device_code.cpp).
  explicit DeviceCode(std::string source) : source_(std::move(source)) {}
  DeviceCode(const DeviceCode&) = delete;
  DeviceCode& operator=(const DeviceCode&) = delete;

  // Compiles and loads it for the GPU, which takes a moment and may wait for what the GPU is doing:
  // so ask once before ranks that share one begin. False: it cannot be had, which is told once.
  bool load(at::Device device);

  // On the current stream. The types of the arguments are those of the kernel.
  template <typename... Arguments>
  void launch(const char* kernel, at::Device device, int64_t blocks, int threads,
              Arguments... arguments) {
    std::array<void*, sizeof...(Arguments)> pointers{&arguments...};
    launch_with(kernel, device, blocks, threads, pointers.data());
  }

 private:
  void launch_with(const char* kernel, at::Device device, int64_t blocks, int threads,
                   void** arguments);
  const std::string source_;
  std::mutex mutex_;
  bool has_failed_ = false;
  std::map<int, void*> modules_;                               // by architecture, 90 for 9.0
  std::map<std::pair<int, std::string_view>, void*> kernels_;  // by device and name
};

}  // namespace yoke::parallel
