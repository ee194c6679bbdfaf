// SPDX-License-Identifier: Apache-2.0
// Answers that gRPC has and clients do not take: what a tenant's hold is bounded, and a call whose
// client takes one too slowly is ended, as over HTTP. Owns: a thread that looks at them.
// Threads: any. What is given out goes before this does.
#pragma once

#include <grpc/grpc.h>

#include <map>
#include <memory>
#include <thread>

#include "yoke/base/mutex.h"
#include "yoke/serve/service.h"

namespace yoke::serve {

class Unread {
 public:
  using Mark = std::shared_ptr<const void>;  // counts until it goes

  // `most_bytes`: of a tenant's; and of all together, beyond which slow clients have less time.
  Unread(size_t most_bytes, Duration idle);
  ~Unread();

  // Refuses who has too many already.
  void check(const Caller& caller) const;
  bool crowded() const;
  Mark hold(int tenant, size_t bytes);
  // From now on so many bytes are written; the mark goes before OnDone() returns.
  Mark write(grpc_call* call, size_t bytes);

 private:
  struct Write {
    grpc_call* call;
    size_t bytes;
    Time since;
  };
  void end_slow();

  const size_t most_;
  const Duration idle_;
  mutable Mutex mutex_;
  Condition closes_;
  bool closing_ YOKE_GUARDED_BY(mutex_) = false;
  size_t bytes_ YOKE_GUARDED_BY(mutex_) = 0;
  std::map<int, size_t> by_tenant_ YOKE_GUARDED_BY(mutex_);
  std::map<uint64_t, Write> writes_ YOKE_GUARDED_BY(mutex_);
  uint64_t next_ YOKE_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;
};

}  // namespace yoke::serve
