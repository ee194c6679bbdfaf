// SPDX-License-Identifier: Apache-2.0
// Runs another program to its end, with a deadline. Owns: the child and everything it started,
// which is killed as one process group when the deadline passes.
#pragma once

#include <string>
#include <vector>

#include "yoke/base/clock.h"

namespace yoke {

struct ProcessResult {
  int exit_code = 0;  // 128+n after signal n
  std::string out;    // standard output
  std::string err;    // standard error
  bool timed_out = false;
};

struct ProcessOptions {
  Duration timeout = std::chrono::seconds(60);
  std::vector<std::string> environment = {};  // "NAME=value", on top of the caller's own
};

// Throws Kind::Io when the program cannot be started; a failing program is an ordinary result.
ProcessResult run_process(const std::vector<std::string>& command,
                          const ProcessOptions& options = {});

// A program that answers line by line. Owns: it and everything it started; both end with this.
class Conversation {
 public:
  explicit Conversation(const std::vector<std::string>& command,
                        const std::vector<std::string>& environment = {});
  ~Conversation();
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  void say(const std::string& line);
  // The next line. Throws Kind::Io if it has ended, Kind::Timeout; both with its last words.
  std::string hear(Duration timeout);

 private:
  void hear_complaints();
  int child_ = 0, in_ = -1, out_ = -1, err_ = -1;
  std::string heard_, name_;
  std::string complaints_;  // the end of what it said on stderr
};

// For those who start processes themselves: the caller's environment with `extra` ("NAME=value") in
// place of its own, and texts as exec wants them, which must outlive the result.
std::vector<std::string> child_environment(const std::vector<std::string>& extra);
std::vector<char*> c_strings(const std::vector<std::string>& texts);

}  // namespace yoke
