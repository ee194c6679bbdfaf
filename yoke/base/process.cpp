// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <thread>

#include "yoke/base/error.h"

extern char** environ;

namespace yoke {
namespace {

struct Pipe {
  std::array<int, 2> ends{-1, -1};
  Pipe() {
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
      fail(Kind::Io, "cannot make a pipe: ", std::strerror(errno));
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_end(int end) {
    if (ends[end] >= 0) ::close(ends[end]);
    ends[end] = -1;
  }
};

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// Reads both pipes until they close or the deadline passes; true when they closed in time.
bool drain(Pipe& out, Pipe& err, ProcessResult& result, Time deadline) {
  const std::array<std::string*, 2> texts{&result.out, &result.err};
  std::array<pollfd, 2> polls{pollfd{out.ends[0], POLLIN, 0}, pollfd{err.ends[0], POLLIN, 0}};
  while (polls[0].fd >= 0 || polls[1].fd >= 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock().now());
    if (left.count() <= 0) return false;
    if (::poll(polls.data(), polls.size(), int(std::min<int64_t>(left.count(), 1 << 30))) < 0)
      continue;
    for (size_t i = 0; i < polls.size(); ++i) {
      if (polls[i].fd < 0 || polls[i].revents == 0) continue;
      std::array<char, 65536> buffer;
      const ssize_t got = ::read(polls[i].fd, buffer.data(), buffer.size());
      if (got > 0) texts[i]->append(buffer.data(), size_t(got));
      if (got == 0 || (got < 0 && errno != EINTR)) polls[i].fd = -1;
    }
  }
  return true;
}

// Reaps the child, killing its group at the deadline.
int reap(pid_t child, bool kill_now, Time deadline, bool& timed_out) {
  int status = 0;
  while (!kill_now && ::waitpid(child, &status, WNOHANG) == 0) {
    kill_now = SteadyClock().now() >= deadline;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (kill_now) {
    timed_out = true;
    ::kill(-child, SIGKILL);
    ::waitpid(child, &status, 0);
  }
  return exit_code_of(status);
}

}  // namespace

std::vector<char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> child_environment(const std::vector<std::string>& extra) {
  std::vector<std::string> merged = extra;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('=') + 1);
    bool replaced = false;
    for (const auto& override_entry : extra) replaced |= override_entry.starts_with(name);
    if (!replaced) merged.emplace_back(text);
  }
  return merged;
}

ProcessResult run_process(const std::vector<std::string>& command, const ProcessOptions& options) {
  YOKE_CHECK(!command.empty());
  const Time deadline = SteadyClock().now() + options.timeout;
  Pipe out, err;
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, err.ends[1], 2);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  const auto environment = child_environment(options.environment);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, command[0].c_str(), &actions, &attributes,
                                   c_strings(command).data(), c_strings(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) fail(Kind::Io, "cannot start '", command[0], "': ", std::strerror(error));
  out.close_end(1);
  err.close_end(1);

  ProcessResult result;
  const bool closed = drain(out, err, result, deadline);
  result.exit_code = reap(child, !closed, deadline, result.timed_out);
  return result;
}

}  // namespace yoke
