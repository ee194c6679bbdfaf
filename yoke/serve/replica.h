// SPDX-License-Identifier: Apache-2.0
// The router's side of one replica: its worker, a process or a thread, the channel to it and the
// line that tells when it is gone. Owns: the worker; it is killed and reaped with this, in seconds.
// Threads: one at a time; start() from a thread that lives as long as the worker does.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "yoke/serve/channel.h"
#include "yoke/serve/worker.h"

namespace yoke::serve {

struct WorkerKind {
  std::vector<std::string> command = {};  // of a process, which finds its line as descriptor 3
  OpenRunner open = {};                   // else of a thread
  std::vector<std::string> environment = {};
};

class Replica {
 public:
  Replica(const WorkerKind& kind, const ReplicaSpec& spec, uint32_t max_rows, uint64_t slab_bytes);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  Channel& channel() { return *channel_; }
  const std::shared_ptr<Channel>& shared_channel() const { return channel_; }
  int line() const { return line_.get(); }         // readable: a message, or it is gone
  int done_event() const { return event_.get(); }  // readable: a batch is done, or text is there
  pid_t pid() const { return pid_; }               // 0 for a thread
  // Asks it to end; the destructor then waits a moment before it kills.
  void stop();
  void kill();
  // True when it has ended, without waiting.
  bool reap();
  std::string how_it_ended();  // "signal 9 (Killed)"; after its line is gone

 private:
  std::shared_ptr<Channel> channel_;
  net::Descriptor line_, event_;
  pid_t pid_ = 0;
  std::optional<int> status_ = {};  // as waitpid() has it
  std::shared_ptr<std::atomic<bool>> over_ = std::make_shared<std::atomic<bool>>(false);
  std::jthread thread_;
};

}  // namespace yoke::serve
