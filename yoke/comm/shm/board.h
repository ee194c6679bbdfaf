// SPDX-License-Identifier: Apache-2.0
// What the members of a group write for each other, in shared memory: a ring of slots for the
// collectives in flight, and for each ordered pair a ring of messages. No locks, so that no death
// can leave one taken: every word is written by one rank or by an atomic step, and only ever grows.
// Operation #s lies in slot s modulo kSlots, which is free for it once all have retired
// #(s-kSlots).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "yoke/comm/operation.h"
#include "yoke/comm/shm/memory.h"

namespace yoke::comm {

class Board {
 public:
  static constexpr uint64_t kSlots = 8;
  static constexpr int kMaxDims = 5;  // tensors of more are described as flat

  struct Piece {
    Location at;
    int64_t num_dims;
    std::array<int64_t, kMaxDims> sizes;
  };
  struct Part {                  // one rank's call; its pieces follow
    std::atomic<uint64_t> came;  // the number of the operation, plus 1; written last
    OpKind kind;
    int reduce;  // -1: none
    int root, color, key;
    at::ScalarType type;
    uint32_t num_inputs, num_outputs;
    Location formed;  // the board of the group that a split has made for this rank
  };
  struct alignas(64) Share {  // the items that one rank should do
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Slot {
    alignas(64) std::atomic<uint64_t> arrived;  // ranks, over all uses of the slot
    alignas(64) std::atomic<uint64_t> stage;    // of the operation in it, see at_stage()
    alignas(64) std::atomic<int64_t> items_left;
    alignas(64) std::atomic<uint64_t> retired;  // ranks, over all uses
  };
  struct Message {
    alignas(64) std::atomic<uint64_t> sent, taken;  // the number of the message, plus 1
    Part part;                                      // the sender's
    Piece piece;
  };
  enum Stage : uint64_t { Open, Starting, Running, Done };
  static uint64_t at_stage(uint64_t sequence, Stage stage) { return sequence * 4 + stage; }

  Board(void* memory, int size) : memory_(static_cast<char*>(memory)), size_(size_t(size)) {}
  static size_t bytes(int size);

  std::atomic<uint64_t>& completed() const { return header().completed; }  // collectives
  std::atomic<int>& users() const { return header().users; }
  Slot& slot(uint64_t sequence) const;
  Share& share(uint64_t sequence, int rank) const;
  Part& part(uint64_t sequence, int rank) const;
  Message& message(int from, int to, uint64_t sequence) const;
  // True when every rank has come to #sequence.
  bool complete(uint64_t sequence) const;

 private:
  struct Header {
    alignas(64) std::atomic<uint64_t> completed;
    std::atomic<int> users;
  };
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  static size_t part_bytes(size_t size);
  static size_t slot_bytes(size_t size);

  char* memory_;
  size_t size_;
};

Board::Piece* pieces_of(Board::Part& part);

// Writes a call whose pieces lie at `places` (inputs, then outputs); `came` is left to the caller.
void write(Board::Part& part, const Operation& operation, const std::vector<Location>& places);
// The call again, as tensors over the mapped memory. With memory null: without their data.
Operation read(Board::Part& part, SharedMemory* memory);

}  // namespace yoke::comm
