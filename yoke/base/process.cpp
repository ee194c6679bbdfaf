// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include "yoke/base/error.h"

extern char** environ;

namespace yoke {
namespace {

struct Pipe {
  std::array<int, 2> ends{-1, -1};
  // A socket instead of a pipe: writing to one that is closed is no signal.
  explicit Pipe(bool socket = false) {
    const int status = socket ? ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data())
                              : ::pipe2(ends.data(), O_CLOEXEC);
    if (status != 0) fail(Kind::Io, "cannot make a pipe: ", std::strerror(errno));
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

// As the leader of a process group of its own.
pid_t spawn(const std::vector<std::string>& command, const std::vector<std::string>& extra, int in,
            int out, int err) {
  YOKE_CHECK(!command.empty());
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in, 0);
  posix_spawn_file_actions_adddup2(&actions, out, 1);
  posix_spawn_file_actions_adddup2(&actions, err, 2);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  const auto environment = child_environment(extra);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, command[0].c_str(), &actions, &attributes,
                                   c_strings(command).data(), c_strings(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) fail(Kind::Io, "cannot start '", command[0], "': ", std::strerror(error));
  return child;
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
  const Time deadline = SteadyClock().now() + options.timeout;
  Pipe out, err;
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const pid_t child = spawn(command, options.environment, nothing, out.ends[1], err.ends[1]);
  ::close(nothing);
  out.close_end(1);
  err.close_end(1);

  ProcessResult result;
  const bool closed = drain(out, err, result, deadline);
  result.exit_code = reap(child, !closed, deadline, result.timed_out);
  return result;
}

Conversation::Conversation(const std::vector<std::string>& command,
                           const std::vector<std::string>& environment)
    : name_(command.at(0)) {
  Pipe in(/*socket=*/true), out, err;
  child_ = spawn(command, environment, in.ends[0], out.ends[1], err.ends[1]);
  in_ = std::exchange(in.ends[1], -1);
  out_ = std::exchange(out.ends[0], -1);
  err_ = std::exchange(err.ends[0], -1);
  ::fcntl(err_, F_SETFL, O_NONBLOCK);
}

Conversation::~Conversation() {
  ::kill(-child_, SIGKILL);
  ::waitpid(child_, nullptr, 0);
  for (const int end : {in_, out_, err_})
    if (end >= 0) ::close(end);
}

void Conversation::say(const std::string& line) {
  const std::string text = line + "\n";
  if (::send(in_, text.data(), text.size(), MSG_NOSIGNAL) != ssize_t(text.size()))
    fail(Kind::Io, "cannot write to '", name_, "': ", std::strerror(errno));
}

std::string Conversation::hear(Duration timeout) {
  const Time deadline = SteadyClock().now() + timeout;
  std::array<char, 65536> buffer;
  while (true) {
    if (const size_t end = heard_.find('\n'); end != std::string::npos) {
      const std::string line = heard_.substr(0, end);
      heard_.erase(0, end + 1);
      return line;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock().now());
    if (left.count() <= 0)
      fail(Kind::Timeout, "'", name_, "' did not answer within ",
           std::chrono::duration_cast<std::chrono::seconds>(timeout).count(),
           " s: ", complaints_.empty() ? "without a word" : complaints_);
    std::array<pollfd, 2> ready{{{out_, POLLIN, 0}, {err_, POLLIN, 0}}};
    if (::poll(ready.data(), ready.size(), int(std::min<int64_t>(left.count(), 1 << 30))) <= 0)
      continue;
    hear_complaints();
    if (ready[0].revents == 0) continue;
    const ssize_t got = ::read(out_, buffer.data(), buffer.size());
    if (got > 0) {
      heard_.append(buffer.data(), size_t(got));
    } else if (got == 0 || errno != EINTR) {
      hear_complaints();
      fail(Kind::Io, "'", name_,
           "' has ended: ", complaints_.empty() ? "without a word" : complaints_);
    }
  }
}

// It must not be held up by what nobody reads.
void Conversation::hear_complaints() {
  constexpr size_t kLastWords = 2000;
  std::array<char, 65536> buffer;
  ssize_t got = 0;
  while (err_ >= 0 && (got = ::read(err_, buffer.data(), buffer.size())) > 0) {
    complaints_.append(buffer.data(), size_t(got));
    if (complaints_.size() > kLastWords) complaints_.erase(0, complaints_.size() - kLastWords);
  }
  if (err_ >= 0 && got == 0) ::close(std::exchange(err_, -1));  // it is closed: no more of it
}

}  // namespace yoke
