// SPDX-License-Identifier: Apache-2.0
// CUDA kernels that are compiled when a GPU wants them, by the NVRTC that LibTorch brings: the
// program is built without a CUDA compiler, and without CUDA at all. Where it cannot be had the
// caller computes with LibTorch's own operations.
// Threads: any.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::parallel {

class DeviceCode {
 public:
  // The kernels of `source` are extern "C". It has the types Bf16 and Fp16, with to_float(x) and
  // put(to, float), and Vector<T, N> (device_code.cpp).
  DeviceCode(std::string source, std::vector<std::string> kernels)
      : source_(std::move(source)), names_(std::move(kernels)) {}
  DeviceCode(const DeviceCode&) = delete;
  DeviceCode& operator=(const DeviceCode&) = delete;

  // Compiles it and puts it on the GPU, which takes a moment and may wait for what the GPU is
  // doing: so ask once before ranks that share one begin. False: it cannot be had, which is told
  // once.
  bool load(at::Device device);

  // On the current stream; after load(). The types of the arguments are those of the kernel.
  template <typename... Arguments>
  void launch(std::string_view kernel, at::Device device, int64_t blocks, int threads,
              Arguments... arguments) {
    std::array<void*, sizeof...(Arguments)> pointers{&arguments...};
    launch_with(kernel, device, blocks, threads, pointers.data());
  }

 private:
  struct Loaded {
    void* context = nullptr;
    std::map<std::string, void*, std::less<>> kernels = {};
  };
  void put_on(at::Device device, Loaded& loaded);
  void launch_with(std::string_view kernel, at::Device device, int64_t blocks, int threads,
                   void** arguments);
  const std::string source_;
  const std::vector<std::string> names_;
  std::mutex mutex_;
  bool has_failed_ = false;
  std::map<int, std::string> compiled_;  // by architecture, 90 for 9.0
  std::map<int, Loaded> loaded_;         // by device
};

// The compute capability of a GPU, 90 for 9.0; throws Kind::Device.
int architecture_of(at::Device device);

}  // namespace yoke::parallel
