// SPDX-License-Identifier: Apache-2.0
// Lines for a file or standard error that nobody waits for: they are collected, and written by a
// thread of their own ten times a second. Lines beyond what it can hold are counted and left out.
// Threads: any.
#pragma once

#include <cstdio>
#include <string>
#include <thread>

#include "yoke/base/mutex.h"

namespace yoke::serve {

class AccessLog {
 public:
  // A path, or - for standard error; empty: nothing is written. Throws Kind::Io.
  explicit AccessLog(const std::string& path);
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  bool on() const { return file_ != nullptr; }
  void write(std::string_view line);

 private:
  void flush();

  std::FILE* file_ = nullptr;
  Mutex mutex_;
  Condition changed_;
  std::string waiting_ YOKE_GUARDED_BY(mutex_);
  size_t left_out_ YOKE_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;
};

}  // namespace yoke::serve
