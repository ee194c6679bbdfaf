// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/loader.h"

#include <ATen/Parallel.h>

#include <utility>

#include "yoke/base/error.h"

namespace yoke::data {

Loader::Loader(std::function<Batch(int64_t number)> read, int threads, int64_t ahead,
               Duration timeout)
    : read_(std::move(read)), ahead_(ahead), timeout_(timeout) {
  YOKE_CHECK(threads >= 1 && ahead >= 1);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

Loader::~Loader() {
  {
    MutexLock lock(mutex_);
    is_over_ = true;
  }
  wanted_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Loader::work() {
  at::get_num_threads();   // first: else the thread takes what any other has set last
  at::set_num_threads(1);  // the others are for who computes
  while (true) {
    int64_t number = 0, turn = 0;
    {
      MutexLock lock(mutex_);
      const auto is_wanted = [&]() YOKE_REQUIRES(mutex_) {
        return is_over_ || (is_open_ && next_ < first_ + ahead_);
      };
      while (!wanted_.wait_for(mutex_, timeout_, is_wanted)) {  // a step may take any time
      }
      if (is_over_) return;
      number = next_++;
      turn = turn_;
      slots_[number] = {};
    }
    Slot slot{.is_ready = true};
    try {
      slot.batch = read_(number);
    } catch (...) {
      slot.error = std::current_exception();
    }
    {
      MutexLock lock(mutex_);
      if (turn != turn_) continue;  // nobody wants it any more
      slots_[number] = std::move(slot);
    }
    ready_.notify_all();
  }
}

Batch Loader::take(int64_t number) {
  Slot slot;
  {
    MutexLock lock(mutex_);
    if (!is_open_ || number != first_) {
      is_open_ = true;
      ++turn_;
      slots_.clear();
      first_ = next_ = number;
    }
    wanted_.notify_all();
    const auto is_there = [&]() YOKE_REQUIRES(mutex_) {
      const auto found = slots_.find(number);
      return found != slots_.end() && found->second.is_ready;
    };
    if (!ready_.wait_for(mutex_, timeout_, is_there))
      fail(Kind::Timeout, "batch ", number, " has not been read after ",
           std::chrono::duration<double>(timeout_).count(), " s");
    slot = std::move(slots_.at(number));
    slots_.erase(number);
    ++first_;
  }
  wanted_.notify_all();
  if (slot.error) std::rethrow_exception(slot.error);
  return slot.batch;
}

}  // namespace yoke::data
