// SPDX-License-Identifier: Apache-2.0
// A folder for what a process unpacks, within TMPDIR and named by its pid. It is the process's
// TMPDIR from then on, and that of all that it starts; folders that dead processes left beside it
// are removed. Owns: the folder. Threads: made before any other is there.
#pragma once

#include <sys/types.h>

#include <filesystem>

#include "yoke/net/socket.h"

namespace yoke::cli {

class Unpacked {
 public:
  // `watched`: a program waits beside this one, and removes the folder however this one ends.
  explicit Unpacked(bool watched);
  ~Unpacked() { remove(); }
  Unpacked(const Unpacked&) = delete;
  Unpacked& operator=(const Unpacked&) = delete;

  void remove();  // now: before an _exit()

 private:
  void start_watcher();

  std::filesystem::path path_;
  net::Descriptor end_;  // of a pipe, which is closed when this process is gone
  pid_t watcher_ = 0;
};

}  // namespace yoke::cli
