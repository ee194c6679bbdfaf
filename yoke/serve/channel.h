// SPDX-License-Identifier: Apache-2.0
// The memory that the router and one worker share: two slabs, each of which carries one batch there
// and its outputs back. While one is computed the other is filled, and stays open for more rows
// until the worker seals it by one atomic exchange: whoever loses that race knows it.
//
//   Free -> Open (or Held: filled, not to be begun yet) -> Sealed -> Done -> Free
//
// The router owns a slab in all phases but Sealed. Rows carry the number of their owner there and
// back. Owns: an anonymous file, which is gone with the last process that has it open.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "yoke/base/event_count.h"
#include "yoke/net/socket.h"

namespace yoke::serve {

inline constexpr int kMaxRank = 16;
inline constexpr int kMaxTensors = 64;
inline constexpr uint32_t kMaxRows = 1 << 16;
inline constexpr size_t kMaxRowErrors = 8;

enum class Phase : uint32_t { Free, Held, Open, Sealed, Done };

struct SlabState {
  Phase phase = Phase::Free;
  uint32_t rows = 0;
  uint32_t word() const { return uint32_t(phase) << 24 | rows; }
  static SlabState of(uint32_t word) { return {Phase(word >> 24), word & 0xffffff}; }
};

struct TensorPlace {
  uint64_t offset = 0;  // from the slab's data
  uint64_t bytes = 0;
  int32_t type = 0;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape = {};  // of a batch, [0] is set when it is sealed
};

using ErrorText = std::array<char, 4096>;

// Invalid: the request cannot be taken, which only the worker sees. TooMany: the outputs of so many
// rows have no room; those of `fits` may.
enum class Result : uint32_t { Ok, Failed, SomeRowsFailed, Invalid, TooMany };

struct SlabHeader {
  std::atomic<uint32_t> state{0};
  // From the router.
  uint32_t is_prompt = 0;  // input 0 is a prompt, input 1 how to go on, in JSON
  uint32_t has_rows = 0;   // the inputs' first sizes are rows
  uint32_t sequence_start = 0, sequence_end = 0;
  uint32_t num_inputs = 0;
  std::array<char, 256> sequence = {};
  uint64_t inputs_end = 0;  // where outputs may begin
  std::array<TensorPlace, kMaxTensors> inputs = {};
  std::atomic<uint32_t> cancelled{0};
  // From the worker.
  std::atomic<uint64_t> streamed{0};  // bytes of text, from inputs_end on
  Result result = Result::Ok;
  uint32_t fits = 0;
  uint32_t num_outputs = 0;
  std::array<TensorPlace, kMaxTensors> outputs = {};
  uint64_t outputs_end = 0;
  int64_t sealed_at = 0, begun_at = 0, computed_at = 0, done_at = 0;  // steady nanoseconds
  int64_t copy_in = 0, copy_out = 0;                                  // of it, by a GPU
  int64_t copies = 0;    // from the begin of the one to the end of the other
  ErrorText error = {};  // of the batch, or of a row that failed
  std::array<ErrorText, kMaxRowErrors> row_errors{};  // of rows that failed: see Slab::failed

  void set_error(std::string_view text);
};

struct Slab {
  SlabHeader* header = nullptr;
  uint64_t* owners = nullptr;       // [rows], what the router wrote
  uint64_t* owners_back = nullptr;  // [rows], what the worker read
  uint8_t* failed = nullptr;        // [rows], 0, or 1 + the place of its error; beyond: not kept
  std::byte* data = nullptr;
};

class Channel {
 public:
  static constexpr int kSlabs = 2;
  // `max_rows` of a batch, and room for its tensors; pages that nobody touches cost nothing.
  Channel(uint32_t max_rows, uint64_t data_bytes);
  explicit Channel(net::Descriptor file);  // the worker's
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int file() const { return file_.get(); }
  uint32_t max_rows() const { return max_rows_; }
  uint64_t data_bytes() const { return data_bytes_; }
  const Slab& slab(int index) const { return slabs_[size_t(index)]; }
  EventCount& to_worker() const { return head().to_worker; }
  std::atomic<uint64_t>& progress() const { return head().progress; }  // grows while it lives
  std::atomic<uint32_t>& stop() const { return head().stop; }
  // Gives the memory of a slab's data back to the system.
  void forget(int index) const;

 private:
  struct Head {
    uint32_t max_rows;
    uint64_t data_bytes;
    EventCount to_worker = {};
    std::atomic<uint64_t> progress{0};
    std::atomic<uint32_t> stop{0};
  };
  void map();
  Head& head() const { return *static_cast<Head*>(memory_); }
  static uint64_t slab_bytes(uint32_t max_rows, uint64_t data_bytes);

  net::Descriptor file_;
  void* memory_ = nullptr;
  uint64_t bytes_ = 0;
  // As they were at the start, whatever a worker writes later.
  uint32_t max_rows_ = 0;
  uint64_t data_bytes_ = 0;
  std::array<Slab, kSlabs> slabs_ = {};
};

}  // namespace yoke::serve
