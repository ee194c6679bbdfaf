// SPDX-License-Identifier: Apache-2.0
// Reads batches before they are wanted, on threads of its own, and keeps a few of them.
// Threads: take() one.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/base/mutex.h"
#include "yoke/data/dataset.h"

namespace yoke::data {

class Loader {
 public:
  // `read` gives the batch of a number; any thread calls it. `ahead`: the most that are kept.
  Loader(std::function<Batch(int64_t number)> read, int threads, int64_t ahead, Duration timeout);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The numbers grow one by one; from another than the next it begins anew. Throws what reading it
  // threw, and Kind::Timeout.
  Batch take(int64_t number);

 private:
  struct Slot {
    Batch batch = {};
    std::exception_ptr error = nullptr;
    bool is_ready = false;
  };
  void work();

  const std::function<Batch(int64_t number)> read_;
  const int64_t ahead_;
  const Duration timeout_;
  Mutex mutex_;
  Condition wanted_, ready_;
  std::map<int64_t, Slot> slots_ YOKE_GUARDED_BY(mutex_);  // given to a thread, or ready
  int64_t first_ YOKE_GUARDED_BY(mutex_) = 0;              // the next that is taken
  int64_t next_ YOKE_GUARDED_BY(mutex_) = 0;               // to be read
  int64_t turn_ YOKE_GUARDED_BY(mutex_) = 0;               // how often it began anew
  bool is_open_ YOKE_GUARDED_BY(mutex_) = false;           // somebody has asked
  bool is_over_ YOKE_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace yoke::data
