// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/run_processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/text.h"
#include "yoke/comm/hub.h"
#include "yoke/net/socket.h"

namespace yoke::comm {
namespace {

constexpr int kReportFd = 3;  // where a child writes what went wrong, outside any world

struct Child {
  pid_t id = 0;
  net::Descriptor report = net::Descriptor();
  std::optional<int> status = {};
};

Child start(const std::vector<std::string>& environment) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    fail(Kind::Io, "cannot make a pipe: ", std::strerror(errno));
  Child child{.report = net::Descriptor(ends[0])};
  const net::Descriptor writing(ends[1]);
  const auto variables = child_environment(environment);
  const auto variable_pointers = c_strings(variables);
  const std::vector<std::string> command{"/proc/self/exe"};
  const auto arguments = c_strings(command);
  const pid_t parent = ::getpid();
  child.id = ::fork();
  if (child.id < 0) fail(Kind::Io, "cannot start a process: ", std::strerror(errno));
  if (child.id == 0) {  // between fork and exec only calls that are safe there
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    if (writing.get() == kReportFd)
      ::fcntl(kReportFd, F_SETFD, 0);
    else
      ::dup2(writing.get(), kReportFd);
    ::execve(arguments[0], arguments.data(), variable_pointers.data());
    ::_exit(127);
  }
  return child;
}

std::string ending(int status) {
  return WIFSIGNALED(status) ? cat("was killed by signal ", WTERMSIG(status), " (",
                                   ::strsignal(WTERMSIG(status)), ")")
                             : cat("ended with exit code ", WEXITSTATUS(status));
}

std::string report_of(const Child& child) {
  std::string text;
  std::array<char, 4096> buffer;
  ::fcntl(child.report.get(), F_SETFL, O_NONBLOCK);
  for (ssize_t got; (got = ::read(child.report.get(), buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), size_t(got));
  return text;
}

}  // namespace

void run_processes(int num_processes, const std::string& function,
                   const ProcessesOptions& options) {
  if (num_processes < 1) fail(Kind::Usage, "a run needs at least 1 process, got ", num_processes);
  Hub hub({"127.0.0.1", 0}, {.num_processes = num_processes, .timeout = options.meet_timeout});
  std::vector<Child> children;
  struct KillAll {
    std::vector<Child>& children;
    ~KillAll() {
      for (const auto& child : children)
        if (!child.status) {
          ::kill(child.id, SIGKILL);
          ::waitpid(child.id, nullptr, 0);
        }
    }
  } const kill_all{children};
  for (int p = 0; p < num_processes; ++p) {
    auto environment = options.environment;
    for (const auto& [name, value] : std::initializer_list<std::pair<const char*, std::string>>{
             {"YOKE_FUNCTION", function},
             {"YOKE_ARGUMENT", options.argument},
             {"YOKE_HUB", to_text(hub.address())},
             {"YOKE_RANK", cat(p)},
             {"YOKE_WORLD_SIZE", cat(num_processes)},
             {"YOKE_LOCAL_RANK", cat(p)},
             {"YOKE_LOCAL_SIZE", cat(num_processes)},
             {"YOKE_NODE_RANK", "0"},
             {"YOKE_NUM_NODES", "1"},
             {"YOKE_JOB_ID", ""}})
      environment.push_back(cat(name, "=", value));
    children.push_back(start(environment));
  }
  if (options.on_start) {
    std::vector<int> ids;
    for (const auto& child : children) ids.push_back(child.id);
    options.on_start(ids);
  }

  std::optional<size_t> first_bad;
  std::optional<Time> until;
  size_t running = children.size();
  while (running > 0) {
    for (size_t p = 0; p < children.size(); ++p) {
      Child& child = children[p];
      int status = 0;
      if (child.status || ::waitpid(child.id, &status, WNOHANG) != child.id) continue;
      child.status = status;
      --running;
      if (status != 0 && !first_bad) {
        first_bad = p;
        until = SteadyClock().now() + options.grace;
      }
    }
    if (until && SteadyClock().now() >= *until) break;  // kill_all sees to the rest
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (!first_bad) return;
  std::vector<std::string> endings;
  for (size_t p = 0; p < children.size(); ++p)
    if (children[p].status.value_or(1) != 0)
      endings.push_back(
          cat("process ", p, " (", children[p].id, ") ",
              children[p].status ? ending(*children[p].status) : "did not end and was killed"));
  // The first failure of the world, unless somebody failed before there was one.
  const auto failure = hub.failure();
  const std::string own = report_of(children[*first_bad]);
  const std::string what = failure && failure->rank >= 0
                               ? cat("rank ", failure->rank, " failed: ", failure->what)
                           : failure      ? failure->what
                           : !own.empty() ? own
                                          : "a process failed";
  fail(failure ? failure->kind : Kind::Comm, what, "\n  ", join(endings, "\n  "));
}

std::optional<int> process_main(const topo::Environment& environment,
                                const ProcessFunctions& functions) {
  const auto name = environment.find("YOKE_FUNCTION");
  if (name == environment.end()) return std::nullopt;
  ::fcntl(kReportFd, F_SETFD, FD_CLOEXEC);
  auto report = [](const char* what) {
    [[maybe_unused]] const auto written = ::write(kReportFd, what, std::strlen(what));
  };
  try {
    const auto function = functions.find(name->second);
    if (function == functions.end())
      fail(Kind::Usage, "this program has no function '", name->second, "' to run in a process");
    const auto argument = environment.find("YOKE_ARGUMENT");
    function->second(topo::discover(environment),
                     argument == environment.end() ? "" : argument->second);
    return 0;
  } catch (const Error& error) {
    report(error.what());
    return exit_code(error.kind());
  } catch (const std::exception& error) {
    report(error.what());
    return 1;
  }
}

}  // namespace yoke::comm
