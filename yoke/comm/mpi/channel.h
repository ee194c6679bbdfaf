// SPDX-License-Identifier: Apache-2.0
// The one door to MPI: a communicator of all processes, one for each world, and the transfers in
// flight on it. Its ranks are the world's. A call that fails throws Kind::Comm with MPI's words.
// Threads: one at a time for a channel and its transfers.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "yoke/comm/world.h"

namespace yoke::comm {

using Bytes = std::span<char>;

// The memory of a transfer must live until it is done; if that never comes, see keep_for_mpi.
class MpiTransfers {
 public:
  MpiTransfers();
  ~MpiTransfers();
  // Moves them on. Throws also when something else than the expected number of bytes has come.
  bool done();

 private:
  friend class MpiChannel;
  struct Request;
  std::vector<Request> requests_;
};

class MpiChannel {
 public:
  // Waits for the other processes, until the world's deadline.
  static std::shared_ptr<MpiChannel> open(const std::shared_ptr<World>& world);
  ~MpiChannel();

  int max_tag() const;
  // In one direction between two ranks, transfers of one tag meet in the order of the calls.
  // Done when the memory may be used again, or only when the receiver has begun to take it.
  enum class Until { Free, Taken };
  void send(int to, int tag, Bytes bytes, MpiTransfers& transfers, Until until = Until::Free) const;
  void recv(int from, int tag, Bytes bytes, MpiTransfers& transfers) const;

 private:
  MpiChannel();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// For what MPI may still write to after a failure: kept until the process ends.
void keep_for_mpi(std::shared_ptr<void> memory);

// Process 0's text, on every process. Collective: every process that the launcher started.
std::string share_over_mpi(const std::string& text);

}  // namespace yoke::comm
