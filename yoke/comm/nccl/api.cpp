// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/nccl/api.h"

#include <type_traits>

#include "yoke/base/error.h"

namespace yoke::comm {
namespace {

constexpr const char* kCure =
    "pip install nvidia-nccl-cu13 brings one; name its libnccl.so.2 in run.nccl";

}  // namespace

std::string NcclApi::version_text() const {
  return cat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

NcclApi open_nccl(const std::string& file, const topo::OpenLibrary& open) {
  NcclApi api{.file = file.empty() ? "libnccl.so.2" : file};
  const topo::Library library = open(api.file.c_str());
  if (!library) fail(Kind::Device, "cannot open NCCL: ", library.error, "; ", kCure);
  auto find = [&](auto& slot, const char* name) {
    slot = library.function<std::remove_pointer_t<std::remove_reference_t<decltype(slot)>>>(name);
    return slot != nullptr;
  };
  NcclResult (*get_version)(int*) = nullptr;
  if (!find(get_version, "ncclGetVersion") || get_version(&api.version) != NcclResult::Success)
    fail(Kind::Device, api.file, " is not NCCL: it does not tell a version; ", kCure);
  auto need = [&](auto& slot, const char* name) {
    if (!find(slot, name))
      fail(Kind::Device, "NCCL ", api.version_text(), " in ", api.file, " has no ", name,
           "; 2.14 or newer is needed: ", kCure);
  };
  need(api.get_unique_id, "ncclGetUniqueId");
  need(api.init, "ncclCommInitRankConfig");
  need(api.async_error, "ncclCommGetAsyncError");
  need(api.finalize, "ncclCommFinalize");
  need(api.destroy, "ncclCommDestroy");
  need(api.abort, "ncclCommAbort");
  need(api.group_start, "ncclGroupStart");
  need(api.group_end, "ncclGroupEnd");
  need(api.all_reduce, "ncclAllReduce");
  need(api.reduce, "ncclReduce");
  need(api.reduce_scatter, "ncclReduceScatter");
  need(api.all_gather, "ncclAllGather");
  need(api.broadcast, "ncclBroadcast");
  need(api.send, "ncclSend");
  need(api.recv, "ncclRecv");
  need(api.error_string, "ncclGetErrorString");
  need(api.last_error, "ncclGetLastError");
  if (!find(api.mem_alloc, "ncclMemAlloc") || !find(api.mem_free, "ncclMemFree"))
    api.mem_alloc = nullptr;
  find(api.comm_register, "ncclCommRegister");
  find(api.split, "ncclCommSplit");
  // Never closed again: NCCL has threads of its own that outlive its communicators.
  static_cast<void>(new topo::Library(library));
  return api;
}

}  // namespace yoke::comm
