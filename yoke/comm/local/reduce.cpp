// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/local/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "yoke/base/error.h"

namespace yoke::comm {
namespace {

template <typename T>
constexpr bool kHalf = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

// The type a fold is computed in: float for halves, unsigned for integers (overflow wraps).
template <typename T, typename = void>
struct Folded {
  using type = T;
};
template <typename T>
struct Folded<T, std::enable_if_t<kHalf<T>>> {
  using type = float;
};

struct Sum {
  template <typename T>
  static T fold(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a | b;
    } else if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return T(U(a) + U(b));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <typename T>
  static T fold(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a & b;
    } else if constexpr (std::is_integral_v<T>) {
      // 16-bit operands would be promoted to int, where their product can overflow.
      return T(uint64_t(a) * uint64_t(b));
    } else {
      return a * b;
    }
  }
};
struct Min {
  template <typename T>
  static T fold(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return (a != a || a < b) ? a : b;
    return a < b ? a : b;
  }
};
struct Max {
  template <typename T>
  static T fold(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return (a != a || a > b) ? a : b;
    return a < b ? b : a;
  }
};

// Two sources, the commonest case by far: one pass, no buffer in between.
template <typename T, typename Fold, bool kMean>
[[gnu::always_inline]] inline void fold_two(const T* a, const T* b, T* x, T* y, int64_t count) {
  using Acc = typename Folded<T>::type;
#pragma GCC ivdep  // targets and sources either coincide or lie apart
  for (int64_t i = 0; i < count; ++i) {
    Acc folded = Fold::fold(Acc(a[i]), Acc(b[i]));
    if constexpr (kMean) folded = folded / Acc(2);
    x[i] = y[i] = T(folded);
  }
}

// Any number of sources and targets, through a block that stays in the first cache.
template <typename T, typename Fold, bool kMean>
[[gnu::always_inline]] inline void fold_many(std::span<const void* const> sources,
                                             std::span<void* const> targets, int64_t begin,
                                             int64_t end) {
  using Acc = typename Folded<T>::type;
  constexpr int64_t kBlock = 4096 / sizeof(Acc);
  alignas(64) Acc folded[kBlock];
  alignas(64) T rounded[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    const T* first = static_cast<const T*>(sources[0]) + at;
    for (int64_t i = 0; i < count; ++i) folded[i] = Acc(first[i]);
    for (size_t s = 1; s < sources.size(); ++s) {
      const T* next = static_cast<const T*>(sources[s]) + at;
      for (int64_t i = 0; i < count; ++i) folded[i] = Fold::fold(folded[i], Acc(next[i]));
    }
    const Acc divisor = Acc(double(kMean ? sources.size() : 1));
    for (int64_t i = 0; i < count; ++i) rounded[i] = T(kMean ? folded[i] / divisor : folded[i]);
    for (void* target : targets)
      std::memcpy(static_cast<T*>(target) + at, rounded, size_t(count) * sizeof(T));
  }
}

template <typename T, typename Fold, bool kMean>
[[gnu::always_inline]] inline void fold_any(std::span<const void* const> sources,
                                            std::span<void* const> targets, int64_t begin,
                                            int64_t end) {
  if (sources.size() == 2 && targets.size() <= 2) {
    auto source = [&](size_t i) { return static_cast<const T*>(sources[i]) + begin; };
    auto target = [&](size_t i) { return static_cast<T*>(targets[i]) + begin; };
    fold_two<T, Fold, kMean>(source(0), source(1), target(0), target(targets.size() - 1),
                             end - begin);
  } else {
    fold_many<T, Fold, kMean>(sources, targets, begin, end);
  }
}

template <typename T, typename Fold, bool kMean>
void kernel_plain(std::span<const void* const> sources, std::span<void* const> targets,
                  int64_t begin, int64_t end) {
  fold_any<T, Fold, kMean>(sources, targets, begin, end);
}

#if defined(__x86_64__)
template <typename T, typename Fold, bool kMean>
[[gnu::target("avx2,f16c")]] void kernel_avx2(std::span<const void* const> sources,
                                              std::span<void* const> targets, int64_t begin,
                                              int64_t end) {
  fold_any<T, Fold, kMean>(sources, targets, begin, end);
}
#endif

// The same sums on either: element-wise operations do not depend on the width of a vector.
template <typename T, typename Fold, bool kMean>
ReduceKernel kernel() {
#if defined(__x86_64__)
  static const bool kAvx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (kAvx2) return kernel_avx2<T, Fold, kMean>;
#endif
  return kernel_plain<T, Fold, kMean>;
}

template <typename T>
ReduceKernel kernel_for(ReduceOp op) {
  constexpr bool kComplex = c10::is_complex<T>::value;
  switch (op) {
    case ReduceOp::Sum:
      return kernel<T, Sum, false>();
    case ReduceOp::Product:
      return kernel<T, Product, false>();
    case ReduceOp::Mean:
      if constexpr (!std::is_integral_v<T>) return kernel<T, Sum, true>();
      break;
    case ReduceOp::Min:
      if constexpr (!kComplex) return kernel<T, Min, false>();
      break;
    case ReduceOp::Max:
      if constexpr (!kComplex) return kernel<T, Max, false>();
      break;
  }
  return nullptr;
}

}  // namespace

ReduceKernel reduce_kernel(at::ScalarType type, ReduceOp op) {
  switch (type) {
    case at::kBool:
      return kernel_for<bool>(op);
    case at::kByte:
      return kernel_for<uint8_t>(op);
    case at::kChar:
      return kernel_for<int8_t>(op);
    case at::kShort:
      return kernel_for<int16_t>(op);
    case at::kInt:
      return kernel_for<int32_t>(op);
    case at::kLong:
      return kernel_for<int64_t>(op);
    case at::kUInt16:
      return kernel_for<uint16_t>(op);
    case at::kUInt32:
      return kernel_for<uint32_t>(op);
    case at::kUInt64:
      return kernel_for<uint64_t>(op);
    case at::kHalf:
      return kernel_for<c10::Half>(op);
    case at::kBFloat16:
      return kernel_for<c10::BFloat16>(op);
    case at::kFloat:
      return kernel_for<float>(op);
    case at::kDouble:
      return kernel_for<double>(op);
    case at::kComplexFloat:
      return kernel_for<c10::complex<float>>(op);
    case at::kComplexDouble:
      return kernel_for<c10::complex<double>>(op);
    default:
      return nullptr;
  }
}

}  // namespace yoke::comm
