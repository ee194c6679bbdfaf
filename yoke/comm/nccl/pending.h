// SPDX-License-Identifier: Apache-2.0
// A group as one rank sees it, and one rank's operations on it. Plain data: what the comments do
// not say otherwise belongs to the rank's issuing thread.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/comm/local/cuda_lane.h"
#include "yoke/comm/nccl/api.h"
#include "yoke/comm/operation.h"

namespace yoke::comm {

struct NcclPending;

struct NcclGroup {
  int size() const { return int(members.size()); }

  // Constant from the start.
  std::string name;
  uint32_t id = 0;           // the same for all ranks of this process
  std::vector<int> members;  // world ranks
  int rank = 0;              // among them

  NcclComm comm = nullptr;
  NcclComm origin = nullptr;         // what comm was split from; only lives
  NcclApi::Stream stream = nullptr;  // of this group alone
  at::Tensor token = {};             // what a barrier reduces
  // Messages of the rank to itself that wait for their other half, and whom they are of.
  using Half = std::pair<Operation, std::shared_ptr<NcclPending>>;
  std::deque<Half> self_sends = {}, self_recvs = {};

  // How many were issued so far: of the issuing rank, under its mutex.
  uint64_t num_collectives = 0;
  std::map<std::pair<OpKind, int>, uint64_t> num_messages = {};  // by direction and peer
};

// One rank's call in a group: of its collectives, or of its messages to or from a peer.
struct NcclCall {
  uint32_t group;
  int rank;     // in the world
  OpKind kind;  // Send, Recv, or Barrier for any collective
  int peer;     // in the group; -1: none
  auto operator<=>(const NcclCall&) const = default;
};

struct NcclPending {
  struct Part {
    Operation operation;
    uint64_t sequence;  // of the group's collectives, or of the pair's messages
    uint64_t ticket;    // of the flight recorder
  };
  enum class Stage { Queued, Launched, Over };

  bool launched() const { return stage.load(std::memory_order_acquire) != Stage::Queued; }
  bool over() const { return stage.load(std::memory_order_acquire) == Stage::Over; }

  // Constant once it is queued.
  NcclGroup* group = nullptr;
  std::shared_ptr<CudaEvent> mark = nullptr;  // where the caller's stream stood
  bool host_waits = false;                    // a barrier: wait() blocks the host
  // The same operation of the ranks on the same GPU, and its number there.
  std::vector<std::pair<NcclCall, uint64_t>> beside = {};

  // Written before the stage becomes Launched.
  std::shared_ptr<CudaEvent> done = nullptr;
  NcclGroup* formed = nullptr;  // by a split
  std::atomic<Stage> stage{Stage::Queued};
  std::atomic<Time> deadline{};  // later for a split that everybody has joined

  std::vector<Part> parts = {};        // one, or the messages of a group; empty when it is over
  int open = 0;                        // messages to itself that wait for their other half
  std::optional<Time> suspected = {};  // since when somebody who has left seems to be missing
};

}  // namespace yoke::comm
