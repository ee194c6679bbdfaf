// SPDX-License-Identifier: Apache-2.0
// A bounded queue between threads. A full queue makes producers wait, a deadline ends every wait,
// and close() wakes everybody: producers are refused, consumers drain what is left and then get
// nothing. Threads: any number of producers and consumers.
#pragma once

#include <deque>
#include <optional>
#include <utility>

#include "yoke/base/clock.h"
#include "yoke/base/mutex.h"

namespace yoke {

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // False when the queue is closed, or still full after the timeout; the item is untouched then.
  [[nodiscard]] bool push(T& item, Duration timeout) {
    {
      MutexLock lock(mutex_);
      const bool ready = wait(not_full_, timeout, [&]() YOKE_REQUIRES(mutex_) {
        return closed_ || items_.size() < capacity_;
      });
      if (!ready || closed_) return false;
      items_.push_back(std::move(item));
    }
    not_empty_.notify_one();
    return true;
  }
  [[nodiscard]] bool push(T&& item, Duration timeout) { return push(item, timeout); }

  // Nothing when the queue is closed and empty, or still empty after the timeout.
  std::optional<T> pop(Duration timeout) {
    std::optional<T> item;
    {
      MutexLock lock(mutex_);
      wait(not_empty_, timeout, [&]() YOKE_REQUIRES(mutex_) { return closed_ || !items_.empty(); });
      if (items_.empty()) return item;
      item = std::move(items_.front());
      items_.pop_front();
    }
    not_full_.notify_one();
    return item;
  }

  void close() {
    {
      MutexLock lock(mutex_);
      closed_ = true;
    }
    not_full_.notify_all();
    not_empty_.notify_all();
  }

  bool closed() const {
    MutexLock lock(mutex_);
    return closed_;
  }
  size_t size() const {
    MutexLock lock(mutex_);
    return items_.size();
  }

 private:
  template <typename Ready>
  bool wait(Condition& condition, Duration timeout, Ready ready) YOKE_REQUIRES(mutex_) {
    return condition.wait_for(mutex_, timeout, ready);
  }

  const size_t capacity_;
  mutable Mutex mutex_;
  Condition not_full_, not_empty_;
  std::deque<T> items_ YOKE_GUARDED_BY(mutex_);
  bool closed_ YOKE_GUARDED_BY(mutex_) = false;
};

}  // namespace yoke
