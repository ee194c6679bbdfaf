// SPDX-License-Identifier: Apache-2.0
// How a group gets its communicator: the first member publishes NCCL's id in the store, everybody
// joins, and a warm-up makes all connections that NCCL would else make on the first use, waiting
// for the peers.
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "yoke/comm/nccl/rank.h"
#include "yoke/comm/wire.h"

namespace yoke::comm {
namespace {

// Connecting loads kernels and maps memory: a deadline meant for one operation may be too short.
constexpr Duration kConnect = std::chrono::seconds(60);
constexpr int64_t kMedium = 1 << 16, kLarge = 1 << 20;  // elements of the warm-up's reductions

}  // namespace

Time NcclRank::connect_deadline() const {
  return SteadyClock().now() + std::max(world().timeout(), kConnect);
}

NcclGroup& NcclRank::form(const std::string& name, std::vector<int> members, int rank) {
  const Time deadline = connect_deadline();
  const std::string what = cat("connecting ", name), key = cat("nccl/", name);
  groups_.push_back(
      {.name = name, .id = process_->group_id(name), .members = std::move(members), .rank = rank});
  NcclGroup& group = groups_.back();
  // In a stream of LibTorch's pool an operation could come to stand behind another group's, which
  // may be waiting for this very one.
  int lowest = 0, highest = 0;
  cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  const auto made = cudaStreamCreateWithPriority(&group.stream, cudaStreamNonBlocking, highest);
  if (made != cudaSuccess)
    fail(Kind::Device, "cannot make a CUDA stream for ", name, ": ", cudaGetErrorString(made));
  const c10::cuda::CUDAStreamGuard guard(
      c10::cuda::getStreamFromExternal(group.stream, device_.index()));
  // Taken before a kernel of the group can run: CUDA may wait for kernels when it looks for memory.
  group.token = at::zeros({1}, at::device(device_).dtype(at::kFloat));
  const at::Tensor scratch =
      at::zeros({std::max(kLarge, int64_t(group.size()))}, group.token.options());
  NcclUniqueId id{};
  if (rank == 0) {
    check(api().get_unique_id(&id), nullptr, what);
    world().store().set(key, std::string(id.bytes, sizeof id.bytes));
  } else {
    const std::string bytes = fetch(key, deadline);
    YOKE_CHECK(bytes.size() == sizeof id.bytes, key);
    std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
  }
  NcclConfig config;
  check(api().init(&group.comm, group.size(), id, rank, &config), nullptr, what);
  settle(group, what, deadline);
  quicken(group, what, deadline);
  warm_up(group, scratch, deadline);
  return group;
}

// Connecting must not block, since a peer may be gone. But NCCL starts a thread for each launch on
// such a communicator, so what is used is a blocking one that is split from it: its launches only
// enqueue, once it is connected.
void NcclRank::quicken(NcclGroup& group, const std::string& what, Time deadline) {
  if (api().split == nullptr) return;
  NcclConfig config;
  config.blocking = 1;
  NcclComm quick = nullptr;
  check(api().split(group.comm, 0, group.rank, &quick, &config), group.comm, what);
  settle(group, what, deadline);
  if (quick == nullptr) return;
  group.origin = std::exchange(group.comm, quick);
  settle(group, what, deadline);
}

void NcclRank::warm_up(const NcclGroup& group, const at::Tensor& scratch, Time deadline) {
  const std::string what = cat("the first operations on ", group.name);
  auto* data = scratch.mutable_data_ptr<float>();
  // NCCL has an algorithm for each size, with connections of its own.
  for (const int64_t count : {int64_t{1}, kMedium, kLarge})
    call(group, what, [&] {
      check(api().all_reduce(data, data, size_t(count), NcclType::Float32, NcclOp::Sum, group.comm,
                             group.stream),
            group.comm, what);
    });
  call(group, what, [&] {
    check(api().all_gather(group.token.const_data_ptr(), data, 1, NcclType::Float32, group.comm,
                           group.stream),
          group.comm, what);
  });
  call(group, what, [&] {
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer == group.rank) continue;
      check(api().send(group.token.const_data_ptr(), 1, NcclType::Float32, peer, group.comm,
                       group.stream),
            group.comm, what);
      check(api().recv(data + peer, 1, NcclType::Float32, peer, group.comm, group.stream),
            group.comm, what);
    }
  });
  const auto done = cuda_mark(device_);
  wait_until([&] { return cuda_passed(*done); }, what, deadline);
}

NcclGroup* NcclRank::split(NcclGroup& group, NcclPending& pending) {
  const auto& [operation, sequence, ticket] = pending.parts[0];
  const std::string prefix = cat("nccl/", group.name, "/", sequence, "/split/");
  world().store().set(cat(prefix, group.rank),
                      Writer().put(operation.color).put(operation.key).bytes());
  std::vector<std::pair<int, int>> chosen;  // (key, rank) of those with the same color
  for (int other = 0; other < group.size(); ++other) {
    const std::string bytes = fetch(cat(prefix, other));
    Reader in(bytes);
    const int color = in.get<int>(), key = in.get<int>();
    if (color == operation.color) chosen.emplace_back(key, other);
  }
  if (operation.color < 0) return nullptr;
  pending.deadline = connect_deadline();  // everybody has come
  std::ranges::sort(chosen);
  std::vector<int> members;
  int rank = 0;
  for (const auto& [key, other] : chosen) {
    if (other == group.rank) rank = int(members.size());
    members.push_back(group.members[size_t(other)]);
  }
  return &form(cat(group.name, "/", sequence, ".", operation.color), std::move(members), rank);
}

}  // namespace yoke::comm
