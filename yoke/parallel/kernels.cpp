// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/kernels.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <memory>

#include "yoke/base/error.h"
#include "yoke/parallel/device_code.h"

namespace yoke::parallel {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kMostBlocks = 4096;  // of a kernel that goes over all elements

constexpr const char* kSource = R"(
#define LOG2E 1.4426950408889634f
#define LEAST __uint_as_float(0xff800000u)  // minus infinity

// A maximum, and the sum of exponentials relative to it.
struct Sum { float most, sum; };
__device__ Sum join(Sum a, Sum b) {
  const float most = fmaxf(a.most, b.most);
  if (most == LEAST) return a;
  return {most, a.sum * exp2f((a.most - most) * LOG2E) + b.sum * exp2f((b.most - most) * LOG2E)};
}

template <typename T, int N>
__device__ void cross_entropy(T* logits, const Long* targets, float* losses, Long words,
                              Long ignored, int to_gradient) {
  typedef Vector<T, N> V;
  __shared__ Sum parts[32];
  V* const row = (V*)(logits + blockIdx.x * words);
  const Long target = targets[blockIdx.x], end = words / N;
  Sum mine = {LEAST, 0.f};
  bool is_number = true;
  for (Long i = threadIdx.x; i < end; i += blockDim.x) {
    const V v = row[i];
    float most = mine.most;
    for (int k = 0; k < N; ++k) {
      const float x = to_float(v.at[k]);
      most = fmaxf(most, x);  // which leaves out what is no number
      is_number = is_number && x == x;
    }
    if (most == LEAST) continue;
    float sum = mine.sum * exp2f((mine.most - most) * LOG2E);
    for (int k = 0; k < N; ++k) sum += exp2f((to_float(v.at[k]) - most) * LOG2E);
    mine = {most, sum};
  }
  if (!is_number) mine = {0.f, __uint_as_float(0x7fc00000u)};
  for (int step = 16; step > 0; step /= 2)
    mine = join(mine, {__shfl_xor_sync(~0u, mine.most, step), __shfl_xor_sync(~0u, mine.sum, step)});
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = parts[0];
  for (int i = 1; i < blockDim.x / 32; ++i) mine = join(mine, parts[i]);
  const bool counts = target != ignored;
  if (threadIdx.x == 0) {
    const float own = counts && target >= 0 && target < words ? to_float(((T*)row)[target]) : 0.f;
    losses[blockIdx.x] = counts ? logf(mine.sum) + mine.most - own : 0.f;
  }
  if (!to_gradient) return;
  __syncthreads();  // the target's has been read
  const float scale = counts ? 1.f / mine.sum : 0.f;
  for (Long i = threadIdx.x; i < end; i += blockDim.x) {
    V v = row[i];
    for (int k = 0; k < N; ++k) {
      const float p = exp2f((to_float(v.at[k]) - mine.most) * LOG2E) * scale;
      put(v.at[k], p - (counts && i * N + k == target ? 1.f : 0.f));
    }
    row[i] = v;
  }
}

template <typename T>
__device__ void cross_entropy_of(T* logits, const Long* targets, float* losses, Long words,
                                 Long ignored, int to_gradient) {
  constexpr int kWide = 16 / sizeof(T);
  if (words % kWide == 0)
    cross_entropy<T, kWide>(logits, targets, losses, words, ignored, to_gradient);
  else
    cross_entropy<T, 1>(logits, targets, losses, words, ignored, to_gradient);
}

template <typename T>
__device__ void multiply(T* values, const float* factor, Long count) {
  const float by = *factor;
  if (by == 1.f) return;
  for (Long i = blockIdx.x * (Long)blockDim.x + threadIdx.x; i < count;
       i += (Long)gridDim.x * blockDim.x)
    put(values[i], to_float(values[i]) * by);
}

#define KERNELS(T, name)                                                                        \
  extern "C" __global__ void cross_entropy_##name(T* logits, const Long* targets, float* losses, \
                                                  Long words, Long ignored, int to_gradient) {   \
    cross_entropy_of<T>(logits, targets, losses, words, ignored, to_gradient);                  \
  }                                                                                             \
  extern "C" __global__ void multiply_##name(T* values, const float* factor, Long count) {       \
    multiply<T>(values, factor, count);                                                         \
  }
KERNELS(float, f32)
KERNELS(Bf16, bf16)
KERNELS(Fp16, f16)
)";

// A warp has a row, and a lane WIDTH vectors of 8 of it.
constexpr const char* kNormSource = R"(
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <typename T>
__device__ void norm(const T* x, const T* branch, T* sum, const T* gamma, const T* beta, T* out,
                     float* means, float* rstds, Long rows, int dim, float eps) {
  typedef Vector<T, 8> V;
  const int lane = threadIdx.x % 32, end = dim / 8;
  const Long row = blockIdx.x * (Long)(blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const V* const from = (const V*)(x + row * dim);
  const V* const other = branch ? (const V*)(branch + row * dim) : nullptr;
  float values[WIDTH][8];
  float total = 0.f;
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    const int i = lane + 32 * j;
    if (i >= end) continue;
    V v = from[i];
    if (other) {
      const V more = other[i];
      for (int k = 0; k < 8; ++k) put(v.at[k], to_float(v.at[k]) + to_float(more.at[k]));
      ((V*)(sum + row * dim))[i] = v;
    }
    for (int k = 0; k < 8; ++k) total += values[j][k] = to_float(v.at[k]);
  }
  const float mean = warp_sum(total) / dim;
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < WIDTH; ++j)
    if (lane + 32 * j < end)
      for (int k = 0; k < 8; ++k) {
        values[j][k] -= mean;
        squares += values[j][k] * values[j][k];
      }
  const float rstd = rsqrtf(warp_sum(squares) / dim + eps);
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    const int i = lane + 32 * j;
    if (i >= end) continue;
    const V g = ((const V*)gamma)[i], b = ((const V*)beta)[i];
    V v;
    for (int k = 0; k < 8; ++k)
      put(v.at[k], values[j][k] * rstd * to_float(g.at[k]) + to_float(b.at[k]));
    ((V*)(out + row * dim))[i] = v;
  }
  if (lane != 0) return;
  means[row] = mean;
  rstds[row] = rstd;
}

// `partial` [blocks, 2, dim]: this block's part of the gradients of gamma and beta.
template <typename T>
__device__ void norm_backward(const T* dout, const T* dsum, const T* x, const T* gamma,
                              const float* means, const float* rstds, T* dx, float* partial,
                              Long rows, int dim) {
  typedef Vector<T, 8> V;
  __shared__ float sums[2][WIDTH * 256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int end = dim / 8;
  float dgamma[WIDTH][8] = {}, dbeta[WIDTH][8] = {};
  for (Long row = blockIdx.x * (Long)warps + warp; row < rows; row += gridDim.x * (Long)warps) {
    const float mean = means[row], rstd = rstds[row];
    float normed[WIDTH][8], dy[WIDTH][8];
    float first = 0.f, second = 0.f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const int i = lane + 32 * j;
      if (i >= end) continue;
      const V v = ((const V*)(x + row * dim))[i], d = ((const V*)(dout + row * dim))[i];
      const V g = ((const V*)gamma)[i];
      for (int k = 0; k < 8; ++k) {
        const float given = to_float(d.at[k]);
        normed[j][k] = (to_float(v.at[k]) - mean) * rstd;
        dgamma[j][k] += given * normed[j][k];
        dbeta[j][k] += given;
        dy[j][k] = given * to_float(g.at[k]);
        first += dy[j][k];
        second += dy[j][k] * normed[j][k];
      }
    }
    first = warp_sum(first) / dim;
    second = warp_sum(second) / dim;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const int i = lane + 32 * j;
      if (i >= end) continue;
      V v, more;
      if (dsum) more = ((const V*)(dsum + row * dim))[i];
      for (int k = 0; k < 8; ++k)
        put(v.at[k], rstd * (dy[j][k] - first - normed[j][k] * second) +
                         (dsum ? to_float(more.at[k]) : 0.f));
      ((V*)(dx + row * dim))[i] = v;
    }
  }
  for (int turn = 0; turn < warps; ++turn) {  // in order: always the same bits
    if (turn == warp)
#pragma unroll
      for (int j = 0; j < WIDTH; ++j)
        for (int k = 0; k < 8; ++k) {
          const int i = (lane + 32 * j) * 8 + k;
          sums[0][i] = dgamma[j][k] + (turn > 0 ? sums[0][i] : 0.f);
          sums[1][i] = dbeta[j][k] + (turn > 0 ? sums[1][i] : 0.f);
        }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    partial[(Long)blockIdx.x * 2 * dim + i] = sums[0][i];
    partial[(Long)blockIdx.x * 2 * dim + dim + i] = sums[1][i];
  }
}

#define KERNELS(T, name)                                                                          \
  extern "C" __global__ void norm_##name(const T* x, const T* branch, T* sum, const T* gamma,      \
                                         const T* beta, T* out, float* means, float* rstds,        \
                                         Long rows, int dim, float eps) {                          \
    norm<T>(x, branch, sum, gamma, beta, out, means, rstds, rows, dim, eps);                      \
  }                                                                                               \
  extern "C" __global__ __launch_bounds__(128) void norm_backward_##name(                         \
      const T* dout, const T* dsum, const T* x, const T* gamma, const float* means,               \
      const float* rstds, T* dx, float* partial, Long rows, int dim) {                            \
    norm_backward<T>(dout, dsum, x, gamma, means, rstds, dx, partial, rows, dim);                 \
  }
KERNELS(float, f32)
KERNELS(Bf16, bf16)
KERNELS(Fp16, f16)
)";

// Of each type.
std::vector<std::string> kernel_names(std::initializer_list<const char*> kernels) {
  std::vector<std::string> names;
  for (const char* kernel : kernels)
    for (const char* type : {"_f32", "_bf16", "_f16"}) names.push_back(cat(kernel, type));
  return names;
}

constexpr int kVector = 8, kMostWide = 8;  // elements; vectors of a lane
constexpr int kNormThreads = 128, kRowsOfBlock = kNormThreads / 32;
constexpr int64_t kNormBlocks = 528;  // of backward: four on each of 132 processors

// For rows of so many elements.
DeviceCode* norm_code(int64_t dim) {
  static const auto all = [] {
    std::array<std::unique_ptr<DeviceCode>, kMostWide + 1> codes;
    for (int width = 1; width <= kMostWide; ++width)
      codes[size_t(width)] = std::make_unique<DeviceCode>(
          cat("#define WIDTH ", width, "\n", kNormSource), kernel_names({"norm", "norm_backward"}));
    return codes;
  }();
  const int64_t width = (dim / kVector + 31) / 32;
  return dim % kVector == 0 && width >= 1 && width <= kMostWide ? all[size_t(width)].get()
                                                                : nullptr;
}

const void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

bool is_type(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.is_cuda() && is_aligned(tensor) &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
}

DeviceCode& code() {
  static DeviceCode instance(kSource, kernel_names({"cross_entropy", "multiply"}));
  return instance;
}

// Of the names of a kernel, that for the type.
const char* of_type(const at::Tensor& tensor, const char* f32, const char* bf16, const char* f16) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return f32;
    case at::kBFloat16:
      return bf16;
    case at::kHalf:
      return f16;
    default:
      fail(Kind::Usage, "there is no kernel for ", c10::toString(tensor.scalar_type()));
  }
}
#define YOKE_NAMES(name) #name "_f32", #name "_bf16", #name "_f16"

}  // namespace

bool is_aligned(const at::Tensor& tensor) {
  const size_t vector = kVector * size_t(tensor.element_size());
  return tensor.is_contiguous() &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % vector == 0;
}

void load_kernels(at::Device device, int64_t dim) {
  if (!device.is_cuda()) return;
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  code().load(device);
  if (DeviceCode* norms = norm_code(dim)) norms->load(device);
}

bool has_kernels(const at::Tensor& tensor) {
  return is_type(tensor) && code().load(tensor.device());
}

bool has_norm_kernels(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!weight.defined() || !bias.defined() || weight.dim() != 1 || x.numel() == 0) return false;
  DeviceCode* const code = norm_code(weight.numel());
  // Where parameters will lie is not yet known under ZeRO 3.
  const bool in_place =
      weight.storage_offset() % kVector == 0 && bias.storage_offset() % kVector == 0;
  return code != nullptr && in_place && is_type(x) && x.size(-1) == weight.numel() &&
         weight.scalar_type() == x.scalar_type() && bias.scalar_type() == x.scalar_type() &&
         weight.device() == x.device() && code->load(x.device());
}

Normed fused_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& gamma,
                  const at::Tensor& beta, double eps) {
  const int64_t dim = x.size(-1), rows = x.numel() / dim;
  const auto numbers = x.options().dtype(at::kFloat);
  Normed normed{x, at::empty_like(x), at::empty({rows}, numbers), at::empty({rows}, numbers)};
  if (branch.defined()) normed.sum = at::empty_like(x);
  norm_code(dim)->launch(of_type(x, YOKE_NAMES(norm)), x.device(),
                         (rows + kRowsOfBlock - 1) / kRowsOfBlock, kNormThreads, pointer(x),
                         pointer(branch), normed.sum.data_ptr(), pointer(gamma), pointer(beta),
                         normed.result.data_ptr(), normed.mean.data_ptr(), normed.rstd.data_ptr(),
                         rows, int(dim), float(eps));
  return normed;
}

NormGradients fused_norm_backward(const at::Tensor& d_result, const at::Tensor& d_sum,
                                  const at::Tensor& x, const at::Tensor& gamma,
                                  const at::Tensor& mean, const at::Tensor& rstd) {
  const int64_t dim = x.size(-1), rows = x.numel() / dim;
  const int64_t blocks = std::min(kNormBlocks, (rows + kRowsOfBlock - 1) / kRowsOfBlock);
  const at::Tensor dx = at::empty_like(x), partial = at::empty({blocks, 2, dim}, mean.options());
  norm_code(dim)->launch(of_type(x, YOKE_NAMES(norm_backward)), x.device(), blocks, kNormThreads,
                         pointer(d_result), pointer(d_sum), pointer(x), pointer(gamma),
                         pointer(mean), pointer(rstd), dx.data_ptr(), partial.data_ptr(), rows,
                         int(dim));
  const at::Tensor sums = partial.sum(0).to(gamma.scalar_type());
  return {dx, sums[0], sums[1]};
}

at::Tensor fused_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                               bool to_gradient) {
  YOKE_CHECK(logits.dim() == 2 && targets.numel() == logits.size(0));
  const at::Tensor words = targets.contiguous();
  YOKE_CHECK(words.scalar_type() == at::kLong);
  const at::Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  code().launch(of_type(logits, YOKE_NAMES(cross_entropy)), logits.device(), logits.size(0),
                kThreads, logits.data_ptr(), words.data_ptr(), losses.data_ptr(), logits.size(1),
                ignored, int(to_gradient));
  return losses;
}

void multiply_unless_one(const at::Tensor& values, const at::Tensor& factor) {
  const at::Tensor by = factor.to(at::kFloat);
  const int64_t blocks = std::min(kMostBlocks, (values.numel() + kThreads - 1) / kThreads);
  code().launch(of_type(values, YOKE_NAMES(multiply)), values.device(), blocks, kThreads,
                values.data_ptr(), by.data_ptr(), values.numel());
}

}  // namespace yoke::parallel
