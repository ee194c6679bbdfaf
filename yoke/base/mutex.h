// SPDX-License-Identifier: Apache-2.0
// A mutex that clang's -Wthread-safety understands, and its lock and condition. Mark what a mutex
// protects: `int count_ YOKE_GUARDED_BY(mutex_);`. Who finds it taken spins a little before
// sleeping: our critical sections are far shorter than a trip through the kernel.
#pragma once

#include <pthread.h>

#include <condition_variable>

#if defined(__clang__)
#define YOKE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define YOKE_THREAD_ANNOTATION(x)
#endif
#define YOKE_GUARDED_BY(x) YOKE_THREAD_ANNOTATION(guarded_by(x))
#define YOKE_REQUIRES(...) YOKE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define YOKE_EXCLUDES(...) YOKE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace yoke {

class YOKE_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  ~Mutex() { pthread_mutex_destroy(&mutex_); }
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() YOKE_THREAD_ANNOTATION(acquire_capability()) { pthread_mutex_lock(&mutex_); }
  void unlock() YOKE_THREAD_ANNOTATION(release_capability()) { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
};

class YOKE_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) YOKE_THREAD_ANNOTATION(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() YOKE_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits on a yoke::Mutex that the caller holds.
using Condition = std::condition_variable_any;

}  // namespace yoke
