// SPDX-License-Identifier: Apache-2.0
// A channel of a program while it runs: a ring of values between one thread that gives and one that
// takes. Values on a GPU come with the point of their stream after which they are there.
// Threads: the giver's and the taker's; start() when neither runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

#include "yoke/base/mutex.h"

namespace c10 {
struct Event;
}

namespace yoke::flow {

struct Value {
  at::Tensor tensor = {};  // undefined: the last one again
  std::shared_ptr<c10::Event> ready = nullptr;
  uint64_t bytes() const { return tensor.defined() ? tensor.nbytes() : 0; }
};

class Pipe {
 public:
  explicit Pipe(size_t capacity) : ring_(capacity) {}

  size_t size() const { return size_t(given_.load() - taken_.load()); }
  size_t room() const { return ring_.size() - size(); }
  Value take() {
    const uint64_t at = taken_.load(std::memory_order_relaxed);
    Value value = std::move(ring_[at % ring_.size()]);
    taken_.store(at + 1);
    return value;
  }
  void give(Value value) {
    const uint64_t at = given_.load(std::memory_order_relaxed);
    ring_[at % ring_.size()] = std::move(value);
    given_.store(at + 1);
  }
  void clear() {
    while (size() > 0) take();
  }

 private:
  std::vector<Value> ring_;
  alignas(64) std::atomic<uint64_t> given_{0};
  alignas(64) std::atomic<uint64_t> taken_{0};
};

// One at which nobody waits: what is taken when nothing new is there is the last one again.
class LoosePipe {
 public:
  LoosePipe(size_t capacity, bool keeps_newest)
      : capacity_(capacity), keeps_newest_(keeps_newest) {}
  Value take() {
    MutexLock lock(mutex_);
    if (values_.empty()) return last_;
    last_ = std::move(values_.front());
    values_.erase(values_.begin());
    return last_;
  }
  void give(Value value) {
    MutexLock lock(mutex_);
    if (values_.size() == capacity_) {
      ++lost_;
      if (!keeps_newest_) return;
      values_.erase(values_.begin());
    }
    values_.push_back(std::move(value));
  }
  uint64_t lost() const {
    MutexLock lock(mutex_);
    return lost_;
  }

 private:
  const size_t capacity_;
  const bool keeps_newest_;
  mutable Mutex mutex_;
  std::vector<Value> values_ YOKE_GUARDED_BY(mutex_);
  Value last_ YOKE_GUARDED_BY(mutex_);
  uint64_t lost_ YOKE_GUARDED_BY(mutex_) = 0;
};

}  // namespace yoke::flow
