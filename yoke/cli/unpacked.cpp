// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/unpacked.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/text.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "yoke-serve-";

// Ends when the other end of its input does. A worker that is killed too may still write there.
constexpr const char* kWatch =
    "cat >/dev/null; for i in 1 2 3 4 5 6 7 8 9; do rm -rf -- \"$0\" && exit; sleep 1; done";

bool is_dead(pid_t pid) {
  if (::kill(pid, 0) != 0) return errno == ESRCH;
  // One that nobody has waited for yet is there, but has no program.
  char unused = 0;
  return ::readlink("/proc/self/exe", &unused, 1) > 0 &&
         ::readlink(cat("/proc/", pid, "/exe").c_str(), &unused, 1) < 0 && errno == ENOENT;
}

void remove_of_dead(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const auto pid = parse_int(split(name.substr(std::strlen(kPrefix)), '-')[0]);
    if (pid && is_dead(pid_t(*pid))) fs::remove_all(entry.path(), ignored);
  }
}

}  // namespace

Unpacked::Unpacked(bool watched) {
  std::error_code failure;
  const auto within = fs::temp_directory_path(failure);
  if (failure)
    fail(Kind::Io, "there is no folder for temporary files: ", failure.message(),
         "; say one by TMPDIR");
  remove_of_dead(within);
  std::string name = within / cat(kPrefix, ::getpid(), "-XXXXXX");
  if (!::mkdtemp(name.data()))
    fail(Kind::Io, "cannot make a folder '", name, "': ", std::strerror(errno),
         "; choose another place by TMPDIR");
  path_ = name;
  if (watched) start_watcher();
  ::setenv("TMPDIR", path_.c_str(), 1);
}

void Unpacked::start_watcher() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(Kind::Io, "cannot make a pipe: ", std::strerror(errno));
  const net::Descriptor theirs(ends[0]);
  end_ = net::Descriptor(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs.get(), 0);
  // Who reads what this process prints is not to wait for the other.
  for (const int out : {1, 2})
    posix_spawn_file_actions_addopen(&actions, out, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // What ends this process by a signal to its group or terminal must not end the other before.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  sigset_t deaf;
  sigemptyset(&deaf);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&deaf, signal);
  posix_spawnattr_setsigmask(&attributes, &deaf);
  const std::vector<std::string> command{"/bin/sh", "-c", kWatch, path_.string()};
  // Without a shell the folder goes with ~Unpacked, or at the next start.
  if (::posix_spawn(&watcher_, command[0].c_str(), &actions, &attributes, c_strings(command).data(),
                    c_strings(child_environment({})).data()) != 0)
    watcher_ = 0;
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
}

void Unpacked::remove() {
  end_.reset();
  if (watcher_ > 0) ::waitpid(std::exchange(watcher_, 0), nullptr, 0);
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace yoke::cli
