// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/supervise.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"

namespace yoke::cli {
namespace {

constexpr const char* kMark = "YOKE_SUPERVISED";
constexpr std::array kForwarded{SIGTERM, SIGINT, SIGUSR1};

std::atomic<pid_t> child_now{0};  // a handler has nothing else to look at

std::atomic<bool> stop_asked{false};

// What is typed at the terminal the child gets as well.
void forward(int signal, siginfo_t* info, void*) {
  stop_asked = true;
  const pid_t child = child_now.load();
  if (child != 0 && info->si_code != SI_KERNEL) ::kill(child, signal);
}

pid_t start(const std::vector<std::string>& command) {
  const auto variables = child_environment({cat(kMark, "=1")});
  const auto arguments = c_strings(command), pointers = c_strings(variables);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) fail(Kind::Io, "cannot start a process: ", std::strerror(errno));
  if (child == 0) {  // between fork and exec only calls that are safe there
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    ::execve(arguments[0], arguments.data(), pointers.data());
    ::_exit(127);
  }
  return child;
}

bool should_restart(int code, bool died) { return died || code == 1 || code == 3; }

}  // namespace

bool is_supervised() { return read_environment().contains(kMark); }

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  auto command = split(text, '\0');
  if (!command.empty() && command.back().empty()) command.pop_back();
  std::array<char, 4096> path{};
  if (command.empty() || ::readlink("/proc/self/exe", path.data(), path.size() - 1) < 0)
    fail(Kind::Io, "cannot find out how this program was started: ", std::strerror(errno));
  command[0] = path.data();
  return command;
}

int supervise(std::vector<std::string> command, int64_t max_restarts) {
  struct sigaction action {};
  action.sa_sigaction = forward;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  for (const int signal : kForwarded) ::sigaction(signal, &action, nullptr);
  if (std::ranges::find(command, "--resume") == command.end()) command.emplace_back("--resume");
  for (int64_t restarts = 0;; ++restarts) {
    const pid_t child = start(command);
    child_now = child;
    if (stop_asked) ::kill(child, SIGTERM);  // it came before there was a child to tell
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    child_now = 0;
    const bool died = WIFSIGNALED(status);
    const int code = died ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (stop_asked || !should_restart(code, died)) return code;
    const std::string how = died ? cat("was killed by signal ", WTERMSIG(status), " (",
                                       ::strsignal(WTERMSIG(status)), ")")
                                 : cat("failed with exit code ", code);
    if (restarts >= max_restarts) {
      std::cerr << "yoke: the run " << how << ", and run.max_restarts = " << max_restarts
                << " are used up\n";
      return code;
    }
    std::cerr << "yoke: the run " << how << "; it goes on from its newest checkpoint (restart "
              << restarts + 1 << " of " << max_restarts << ")\n";
  }
}

}  // namespace yoke::cli
