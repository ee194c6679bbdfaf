// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/device_code.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <algorithm>

#include <vector>

#include "yoke/base/error.h"
#include "yoke/observe/log.h"
#include "yoke/topo/library.h"

namespace yoke::parallel {
namespace {

// The types that a tensor may have, as float and back.
constexpr const char* kTypes = R"(
typedef unsigned short Half;
typedef long long Long;
struct Bf16 { Half bits; };
struct Fp16 { Half bits; };
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(Fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline void put(float& to, float x) { to = x; }
__device__ inline void put(Bf16& to, float x) {  // to the nearest, ties to even
  const unsigned bits = __float_as_uint(x);
  to.bits = x != x ? (Half)0x7fc0 : (Half)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ inline void put(Fp16& to, float x) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector { T at[N]; };
)";

// Of the driver and of NVRTC; their types are pointers and integers.
struct Functions {
  topo::Library library = topo::open_library("libcaffe2_nvrtc.so");  // needs both

  template <typename Function>
  Function* get(const char* name) const {
    auto* function = library.function<Function>(name);
    if (!function)
      fail(Kind::Device, "NVRTC cannot be had: ", library.error.empty() ? name : library.error);
    return function;
  }
};

const Functions& functions() {
  static const Functions instance;
  return instance;
}

template <typename... Given, typename... Wanted>
void call(int (*function)(Wanted...), const char* name, Given... arguments) {
  if (const int result = function(arguments...)) fail(Kind::Device, name, " gave error ", result);
}
#define YOKE_CALL(name, signature, ...) call(functions().get<signature>(#name), #name, __VA_ARGS__)

// The thread's context while this lives: backward's threads may have none, or another GPU's.
class InContext {
 public:
  explicit InContext(void* context) {
    static const auto push = functions().get<int(void*)>("cuCtxPushCurrent_v2");
    call(push, "cuCtxPushCurrent", context);
  }
  ~InContext() {
    static const auto pop = functions().get<int(void**)>("cuCtxPopCurrent_v2");
    void* context = nullptr;
    pop(&context);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
};

std::string compile(const std::string& source, int architecture) {
  using Program = void*;
  Program program = nullptr;
  YOKE_CALL(nvrtcCreateProgram,
            int(Program*, const char*, const char*, int, const char* const*, const char* const*),
            &program, source.c_str(), "yoke.cu", 0, nullptr, nullptr);
  const std::string target = cat("--gpu-architecture=sm_", architecture);
  const std::vector<const char*> options{target.c_str(), "--std=c++17"};
  const auto compile =
      functions().get<int(Program, int, const char* const*)>("nvrtcCompileProgram");
  const int result = compile(program, int(options.size()), options.data());
  size_t size = 0;
  if (result != 0) {
    YOKE_CALL(nvrtcGetProgramLogSize, int(Program, size_t*), program, &size);
    std::string log(size, 0);
    YOKE_CALL(nvrtcGetProgramLog, int(Program, char*), program, log.data());
    fail(Kind::Device, "NVRTC cannot compile for ", target, ": ", log);
  }
  YOKE_CALL(nvrtcGetCUBINSize, int(Program, size_t*), program, &size);
  std::string code(size, 0);
  YOKE_CALL(nvrtcGetCUBIN, int(Program, char*), program, code.data());
  YOKE_CALL(nvrtcDestroyProgram, int(Program*), &program);
  return code;
}

}  // namespace

int architecture_of(at::Device device) {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  int handle = 0, major = 0, minor = 0;
  const auto get = functions().get<int(int*, int, int)>("cuDeviceGetAttribute");
  YOKE_CALL(cuInit, int(unsigned), 0u);  // where nobody has used the GPU yet
  YOKE_CALL(cuDeviceGet, int(int*, int), &handle, std::max(0, int(device.index())));
  call(get, "cuDeviceGetAttribute", &major, kMajor, handle);
  call(get, "cuDeviceGetAttribute", &minor, kMinor, handle);
  return major * 10 + minor;
}

bool DeviceCode::load(at::Device device) {
  if (!device.is_cuda()) return false;
  const std::lock_guard lock(mutex_);
  if (has_failed_) return false;
  if (loaded_.contains(device.index())) return true;
  try {
    Loaded loaded;
    put_on(device, loaded);
    loaded_[device.index()] = std::move(loaded);
    return true;
  } catch (const Error& error) {
    observe::Log().warning("no kernels of our own on this GPU, LibTorch's take their place",
                           {{"device", device.str()}, {"why", error.what()}});
    has_failed_ = true;
    return false;
  }
}

void DeviceCode::put_on(at::Device device, Loaded& loaded) {
  const int architecture = architecture_of(device);
  std::string& code = compiled_[architecture];
  if (code.empty()) code = compile(kTypes + source_, architecture);
  int handle = 0;
  YOKE_CALL(cuDeviceGet, int(int*, int), &handle, int(device.index()));
  YOKE_CALL(cuDevicePrimaryCtxRetain, int(void**, int), &loaded.context, handle);
  const InContext in_context(loaded.context);
  void* library = nullptr;
  YOKE_CALL(cuLibraryLoadData,
            int(void**, const void*, void*, void*, unsigned, void*, void*, unsigned), &library,
            code.data(), nullptr, nullptr, 0u, nullptr, nullptr, 0u);
  for (const auto& name : names_) {
    void *kernel = nullptr, *function = nullptr;
    YOKE_CALL(cuLibraryGetKernel, int(void**, void*, const char*), &kernel, library, name.c_str());
    YOKE_CALL(cuKernelGetFunction, int(void**, void*), &function, kernel);  // loads it
    loaded.kernels[name] = function;
  }
}

void DeviceCode::launch_with(std::string_view kernel, at::Device device, int64_t blocks,
                             int threads, void** arguments) {
  if (blocks == 0) return;
  using U = unsigned;
  static const auto cu_launch =
      functions().get<int(void*, U, U, U, U, U, U, U, void*, void**, void**)>("cuLaunchKernel");
  std::unique_lock lock(mutex_);
  const Loaded& loaded = loaded_.at(device.index());  // stays where it is
  lock.unlock();
  const InContext in_context(loaded.context);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  call(cu_launch, "cuLaunchKernel", loaded.kernels.find(kernel)->second, U(blocks), 1u, 1u,
       U(threads), 1u, 1u, 0u, stream.native_handle(), arguments, nullptr);
}

}  // namespace yoke::parallel
