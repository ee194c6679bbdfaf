// SPDX-License-Identifier: Apache-2.0
// Threads that wait for work, each with its part of the cores. Threads: any; calls are queued.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "yoke/base/queue.h"

namespace yoke::parallel {

class Workers {
 public:
  using Task = std::function<void()>;
  // `threads`: of LibTorch, for each.
  Workers(int count, int threads);
  ~Workers();

  // The i-th task on the i-th thread; an empty one is left out. Returns when all are done; throws
  // what the first of them that failed has thrown.
  void run(std::vector<Task> tasks);

 private:
  struct Worker {
    BoundedQueue<Task> tasks{64};
    std::jthread thread = {};
  };
  std::deque<Worker> workers_;
};

}  // namespace yoke::parallel
