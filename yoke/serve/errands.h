// SPDX-License-Identifier: Apache-2.0
// What takes long, as loading a model does: one after the other, whoever asked for it, in a thread
// that may wait. A client's errands refer to what it owns, so it closes before that goes.
// Owns: the thread. Threads: any.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "yoke/base/mutex.h"

namespace yoke::serve {

class Errands {
 public:
  static constexpr size_t kMost = 64;  // that wait

  class Client {
   public:
    explicit Client(Errands& errands) : errands_(errands) {}
    ~Client() { close(); }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    // Throws Refused where too many wait, or after close(). An errand must not throw.
    void add(std::function<void()> errand);
    // Those that wait are forgotten, and the one that runs is waited for. Not from an errand.
    void close();

   private:
    Errands& errands_;
    bool closed_ = false;  // guarded by the errands' mutex
  };

  Errands();
  ~Errands();  // after all clients

 private:
  struct Errand {
    const Client* of = nullptr;
    std::function<void()> act = {};
  };
  void run(const std::stop_token& stop);

  Mutex mutex_;
  Condition changed_;
  std::deque<Errand> waiting_ YOKE_GUARDED_BY(mutex_);
  const Client* running_ YOKE_GUARDED_BY(mutex_) = nullptr;
  std::jthread thread_;
};

}  // namespace yoke::serve
