// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/grpc/unread.h"

#include <algorithm>
#include <vector>

namespace yoke::serve {

Unread::Unread(size_t most_bytes, Duration idle)
    : most_(most_bytes), idle_(idle), thread_([this] { end_slow(); }) {}

Unread::~Unread() {
  {
    const MutexLock lock(mutex_);
    closing_ = true;
  }
  closes_.notify_all();
}

void Unread::check(const Caller& caller) const {
  const MutexLock lock(mutex_);
  const auto found = by_tenant_.find(caller.tenant);
  if (found != by_tenant_.end() && found->second > most_)
    throw Refused{{Status::Exhausted,
                   cat("tenant '", caller.name, "' has ", found->second,
                       " bytes of answers that its clients do not take, of at most ", most_,
                       "; serve.max_queue_mb makes it more"),
                   1}};
}

bool Unread::crowded() const {
  const MutexLock lock(mutex_);
  return bytes_ > most_;
}

Unread::Mark Unread::hold(int tenant, size_t bytes) {
  const MutexLock lock(mutex_);
  bytes_ += bytes;
  by_tenant_[tenant] += bytes;
  return {this, [this, tenant, bytes](const void*) {
            const MutexLock inner(mutex_);
            bytes_ -= bytes;
            by_tenant_[tenant] -= bytes;
          }};
}

Unread::Mark Unread::write(grpc_call* call, size_t bytes) {
  const MutexLock lock(mutex_);
  const uint64_t number = next_++;
  writes_[number] = {call, bytes, SteadyClock().now()};
  return {this, [this, number](const void*) {
            const MutexLock inner(mutex_);
            writes_.erase(number);
          }};
}

void Unread::end_slow() {
  for (;;) {
    std::vector<grpc_call*> slow;
    {
      const MutexLock lock(mutex_);
      const bool full = bytes_ > most_;
      const Time now = SteadyClock().now();
      for (const auto& [number, write] : writes_) {
        if (now - write.since <= time_to_take(write.bytes, idle_, full)) continue;
        ::grpc_call_ref(write.call);  // it may end before it is told to
        slow.push_back(write.call);
      }
    }
    for (auto* call : slow) {  // without the mutex, as it calls back
      ::grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED,
                                     "the answer was not taken in time", nullptr);
      ::grpc_call_unref(call);
    }
    const MutexLock lock(mutex_);
    if (closes_.wait_for(mutex_, std::chrono::milliseconds(500), [this] { return closing_; }))
      return;
  }
}

}  // namespace yoke::serve
