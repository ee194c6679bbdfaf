// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/replica.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/serve/control.h"

namespace yoke::serve {
namespace {

pid_t spawn(const WorkerKind& kind, int line) {
  constexpr int kLine = 3;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // Over another number first: onto itself it would stay closed on exec.
  const net::Descriptor moved(::fcntl(line, F_DUPFD_CLOEXEC, 10));
  posix_spawn_file_actions_adddup2(&actions, moved.get(), kLine);
  posix_spawn_file_actions_addclosefrom_np(&actions, kLine + 1);  // sockets of clients
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // A Ctrl-C in the terminal is the router's to handle, and the router's masks are its own.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
  posix_spawnattr_setpgroup(&attributes, 0);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  const auto environment = child_environment(kind.environment);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, kind.command[0].c_str(), &actions, &attributes,
                                   c_strings(kind.command).data(), c_strings(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) fail(Kind::Io, "cannot start a worker: ", std::strerror(error));
  return child;
}

}  // namespace

Replica::Replica(const WorkerKind& kind, const ReplicaSpec& spec, uint32_t max_rows,
                 uint64_t slab_bytes)
    : channel_(std::make_shared<Channel>(max_rows, slab_bytes)),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) fail(Kind::Io, "cannot make an eventfd: ", std::strerror(errno));
  auto [mine, theirs] = make_line();
  line_ = std::move(mine);
  send_message(line_.get(), to_json(spec), {channel_->file(), event_.get()});
  if (!kind.command.empty())
    pid_ = spawn(kind, theirs.get());
  else
    thread_ = std::jthread([line = std::move(theirs), open = kind.open, over = over_]() mutable {
      run_worker(std::move(line), open);
      over->store(true);
    });
}

void Replica::stop() {
  channel_->stop().store(1);
  channel_->to_worker().notify_all();
}

void Replica::kill() {
  if (pid_ > 0 && !status_) ::kill(pid_, SIGKILL);
}

bool Replica::reap() {
  if (pid_ == 0) return over_->load();
  int status = 0;
  if (!status_ && ::waitpid(pid_, &status, WNOHANG) != 0) status_ = status;
  return status_.has_value();
}

std::string Replica::how_it_ended() {
  if (pid_ == 0) return "its thread ended";
  const auto deadline = SteadyClock().now() + std::chrono::milliseconds(5);
  while (!reap() && SteadyClock().now() < deadline)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (!status_) return "its line is closed";
  if (WIFSIGNALED(*status_))
    return cat("signal ", WTERMSIG(*status_), " (", ::strsignal(WTERMSIG(*status_)), ")");
  return cat("exit ", WEXITSTATUS(*status_));
}

Replica::~Replica() {
  stop();
  line_.reset();
  const auto deadline = SteadyClock().now() + std::chrono::milliseconds(500);
  if (pid_ == 0) {
    while (!over_->load() && SteadyClock().now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // A thread cannot be killed; one that hangs has all it uses to itself.
    if (!over_->load()) thread_.detach();
    return;
  }
  // One that sleeps where no signal wakes it is left to init.
  while (!reap() && SteadyClock().now() < deadline + std::chrono::seconds(3)) {
    if (SteadyClock().now() > deadline) kill();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace yoke::serve
