// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/workers.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <latch>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

constexpr Duration kForever = std::chrono::hours(1000);  // until it is closed

}  // namespace

Workers::Workers(int count, int threads) {
  for (int i = 0; i < count; ++i) {
    auto& worker = workers_.emplace_back();
    worker.thread = std::jthread([&worker, threads] {
      at::get_num_threads();  // else a thread takes what any other set last
      at::set_num_threads(threads);
      while (!worker.tasks.closed())
        if (auto task = worker.tasks.pop(kForever)) (*task)();
    });
  }
}

Workers::~Workers() {
  for (auto& worker : workers_) worker.tasks.close();
}

void Workers::run(std::vector<Task> tasks) {
  YOKE_CHECK(tasks.size() <= workers_.size());
  std::vector<std::exception_ptr> errors(tasks.size());
  std::latch left(std::ranges::count_if(tasks, [](const auto& task) { return task != nullptr; }));
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (!tasks[i]) continue;
    Task guarded([&task = tasks[i], &error = errors[i], &left] {
      try {
        task();
      } catch (...) {
        error = std::current_exception();
      }
      left.count_down();
    });
    YOKE_CHECK(workers_[i].tasks.push(std::move(guarded), kForever));
  }
  left.wait();  // for all of them: they use what is the caller's
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace yoke::parallel
