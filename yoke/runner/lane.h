// SPDX-License-Identifier: Apache-2.0
// The way of a batch to its device and back. On a CPU a batch that need not grow stays where it
// lies; to a GPU it goes through pinned memory, which is kept for the next one.
// Threads: the one that made it, whose stream on the GPU is its own from then on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <span>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/serve/worker.h"

namespace yoke::runner {

class Lane {
 public:
  // Throws Kind::Device. `timed`: a GPU notes when copies begin and end.
  explicit Lane(at::Device device, bool timed = false);
  ~Lane();
  at::Device device() const { return device_; }
  // The input at `place`, grown to so many rows by its first one; 0: as it is. Into `to`, where
  // there is one.
  at::Tensor there(size_t place, const at::Tensor& value, int64_t rows, const at::Tensor& to = {});
  // Each into memory of its size; all is there on return.
  void back(const std::vector<at::Tensor>& from, const std::vector<std::span<std::byte>>& to);
  bool lost() const;  // an error has left the device so that every later call fails
  // Of the last batch that went there and came back; zero where nobody timed it.
  const serve::Runner::Copies& copies() const { return copies_; }

 private:
  void wait();
  at::Tensor pinned(std::vector<at::Tensor>& kept, size_t place, at::IntArrayRef sizes,
                    at::ScalarType dtype);
  enum Mark { kInBegins, kInEnds, kOutBegins, kOutEnds, kMarks };
  void mark(Mark mark);
  Duration between(Mark a, Mark b) const;

  const at::Device device_;
  std::vector<c10::Event> marks_ = {};  // none where it is not timed
  bool arriving_ = false;               // some of the batch has been sent there
  std::vector<bool> reading_ = {};      // pinned inputs that may still be copied from
  serve::Runner::Copies copies_ = {};
  std::vector<at::Tensor> pinned_in_ = {}, pinned_out_ = {};
};

}  // namespace yoke::runner
