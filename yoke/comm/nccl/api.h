// SPDX-License-Identifier: Apache-2.0
// The part of NCCL's binary interface that we use, found in a library at run time. The names and
// numbers are those of nccl.h, which is not needed to build; NCCL keeps them from version to
// version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "yoke/topo/library.h"

struct CUstream_st;  // CUDA's cudaStream_t points to it

namespace yoke::comm {

using NcclComm = struct NcclCommunicator*;  // NCCL's own

struct NcclUniqueId {
  char bytes[128];
};

// As NCCL 2.14 knew it: a newer library fills in what it has learnt since.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  uint32_t magic = 0xcafebeef;
  uint32_t version = 21400;
  int blocking = 0;
};

enum class NcclResult : int {
  Success = 0,
  CudaError = 1,
  SystemError = 2,
  InternalError = 3,
  InvalidArgument = 4,
  InvalidUsage = 5,
  RemoteError = 6,
  InProgress = 7
};
enum class NcclOp : int { Sum = 0, Product = 1, Max = 2, Min = 3, Mean = 4 };
enum class NcclType : int {
  Int8 = 0,
  Uint8 = 1,
  Int32 = 2,
  Int64 = 4,
  Float16 = 6,
  Float32 = 7,
  Float64 = 8,
  Bfloat16 = 9
};

struct NcclApi {
  using Stream = CUstream_st*;
  template <typename... Arguments>
  using Function = NcclResult (*)(Arguments...);

  std::string file = {};
  int version = 0;  // 23203 is 2.32.3
  std::string version_text() const;

  Function<NcclUniqueId*> get_unique_id = nullptr;
  Function<NcclComm*, int, NcclUniqueId, int, NcclConfig*> init = nullptr;
  Function<NcclComm, int, int, NcclComm*, NcclConfig*> split = nullptr;  // color, key; may be null
  Function<NcclComm, NcclResult*> async_error = nullptr;
  Function<NcclComm> finalize = nullptr, destroy = nullptr, abort = nullptr;
  Function<> group_start = nullptr, group_end = nullptr;
  Function<const void*, void*, size_t, NcclType, NcclOp, NcclComm, Stream> all_reduce = nullptr;
  Function<const void*, void*, size_t, NcclType, NcclOp, int, NcclComm, Stream> reduce = nullptr;
  Function<const void*, void*, size_t, NcclType, NcclOp, NcclComm, Stream> reduce_scatter = nullptr;
  Function<const void*, void*, size_t, NcclType, NcclComm, Stream> all_gather = nullptr;
  Function<const void*, void*, size_t, NcclType, int, NcclComm, Stream> broadcast = nullptr;
  Function<const void*, size_t, NcclType, int, NcclComm, Stream> send = nullptr;
  Function<void*, size_t, NcclType, int, NcclComm, Stream> recv = nullptr;
  // Null in a library that has none.
  Function<void**, size_t> mem_alloc = nullptr;
  Function<void*> mem_free = nullptr;
  Function<NcclComm, void*, size_t, void**> comm_register = nullptr;
  const char* (*error_string)(NcclResult) = nullptr;
  const char* (*last_error)(NcclComm) = nullptr;
};

// Throws Kind::Device with what is missing and what to install.
NcclApi open_nccl(const std::string& file, const topo::OpenLibrary& open = topo::open_library);

}  // namespace yoke::comm
