// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/errands.h"

#include <algorithm>
#include <iterator>

#include "yoke/serve/status.h"

namespace yoke::serve {

Errands::Errands() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

Errands::~Errands() {
  thread_.request_stop();
  {
    const MutexLock lock(mutex_);  // it waits, or has not looked yet
  }
  changed_.notify_all();
}

void Errands::run(const std::stop_token& stop) {
  for (;;) {
    Errand next;
    {
      const MutexLock lock(mutex_);
      changed_.wait(mutex_, [&]() YOKE_REQUIRES(mutex_) {
        return stop.stop_requested() || !waiting_.empty();
      });
      if (stop.stop_requested()) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
      running_ = next.of;
    }
    next.act();
    next.act = nullptr;  // what it holds goes before its client does
    {
      const MutexLock lock(mutex_);
      running_ = nullptr;
    }
    changed_.notify_all();
  }
}

void Errands::Client::add(std::function<void()> errand) {
  {
    const MutexLock lock(errands_.mutex_);
    if (closed_) refuse(Status::Unavailable, "the server is about to end; ask another");
    if (errands_.waiting_.size() >= kMost)
      throw Refused{{Status::Exhausted, cat(kMost, " changes wait already"), 1}};
    errands_.waiting_.push_back({this, std::move(errand)});
  }
  errands_.changed_.notify_all();
}

void Errands::Client::close() {
  std::deque<Errand> forgotten;  // they go when the mutex is free
  const MutexLock lock(errands_.mutex_);
  closed_ = true;
  auto& waiting = errands_.waiting_;
  const auto mine = std::stable_partition(waiting.begin(), waiting.end(),
                                          [this](const Errand& one) { return one.of != this; });
  std::move(mine, waiting.end(), std::back_inserter(forgotten));
  waiting.erase(mine, waiting.end());
  errands_.changed_.wait(errands_.mutex_, [this] { return errands_.running_ != this; });
}

}  // namespace yoke::serve
