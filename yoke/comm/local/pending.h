// SPDX-License-Identifier: Apache-2.0
// Operations in flight inside a LocalGroup. Plain data that the group's engine works on; what is
// not atomic is guarded by the group's mutex until the operation is settled, and constant from then
// on.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/comm/local/cuda_lane.h"
#include "yoke/comm/local/jobs.h"
#include "yoke/comm/operation.h"

namespace yoke::comm {

class LocalGroup;

struct Pending {
  // Open: somebody has not come. Settled: everybody has, so it will be done whatever else fails.
  // Done: the result is in memory; on CUDA: enqueued.
  enum class Stage { Open, Settled, Starting, Running, Done };

  virtual ~Pending() = default;
  virtual void drop_tensors() = 0;
  virtual std::string text() const = 0;  // "all_reduce #5", "recv #0 from rank 1"

  bool settled() const { return stage.load(std::memory_order_acquire) != Stage::Open; }
  bool done() const { return stage.load(std::memory_order_acquire) == Stage::Done; }
  bool over() const { return done() && (!on_cuda || cuda_passed(*launched)); }

  alignas(64) std::atomic<Stage> stage{Stage::Open};  // read by all who wait
  alignas(64) OpKind kind = OpKind::Barrier;
  uint64_t sequence = 0;          // of the group's collectives, or of the pair's messages
  std::vector<int> missing = {};  // world ranks that have not come

  bool on_cuda = false;
  CudaLane* lane = nullptr;  // the group's
  uint32_t lane_number = 0;
  std::shared_ptr<CudaEvent> launched = nullptr;  // set before Done
};

// One collective of all ranks.
struct Collective final : Pending {
  struct alignas(64) Share {  // the items that one rank should do
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  explicit Collective(size_t size)
      : parts(size), tickets(size), marks(size), shares(size), formed(size) {}
  void drop_tensors() override { parts.clear(); }
  std::string text() const override { return cat(to_string(kind), " #", sequence); }
  // Those that have items.
  int64_t num_shares() const { return std::min(int64_t(shares.size()), items.size()); }

  std::vector<Operation> parts;  // by rank
  std::vector<uint64_t> tickets;
  std::vector<std::shared_ptr<CudaEvent>> marks;  // where each rank's stream stood
  CpuItems items = {};
  std::vector<Share> shares;
  std::atomic<int64_t> items_left{0};
  std::vector<std::pair<std::shared_ptr<LocalGroup>, int>> formed;  // by a split
};

// One side of a send and its recv.
struct Message final : Pending {
  explicit Message(Operation operation) : part(std::move(operation)) {}
  void drop_tensors() override { part = Operation{.kind = kind}; }
  std::string text() const override {
    return cat(to_string(kind), " #", sequence, kind == OpKind::Send ? " to rank " : " from rank ",
               peer);
  }

  Operation part;
  int rank = 0;
  int peer = 0;  // as the world counts
  uint64_t ticket = 0;
  std::shared_ptr<CudaEvent> mark = nullptr;
};

}  // namespace yoke::comm
