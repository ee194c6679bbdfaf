// SPDX-License-Identifier: Apache-2.0
#include "yoke/checkpoint/files.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "yoke/base/error.h"

namespace yoke::checkpoint {
namespace {

[[noreturn]] void refuse(const char* what, const Path& path, int code) {
  fail(Kind::Io, "cannot ", what, " '", path.string(), "': ", std::strerror(code),
       code == ENOSPC ? "; free some space, or choose another checkpoint.dir" : "");
}

}  // namespace

DurableFile::DurableFile(Path path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) refuse("create", path_, errno);
}

DurableFile::~DurableFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(path_.c_str());
}

void DurableFile::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_, at, std::min<size_t>(bytes, 1 << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse("write", path_, errno);
    at += written;
    bytes -= size_t(written);
  }
}

void DurableFile::finish() {
  if (::fsync(fd_) != 0) refuse("write", path_, errno);
  if (::close(std::exchange(fd_, -1)) != 0) refuse("write", path_, errno);
}

void write_durably(const Path& path, const std::string& text) {
  const Path other = path.string() + ".new";
  DurableFile file(other);
  file.write(text.data(), text.size());
  file.finish();
  rename_durably(other, path);
}

std::string read_text(const Path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (!file) refuse("read", path, errno);
  return text;
}

void sync_folder(const Path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool good = fd >= 0 && ::fsync(fd) == 0;
  const int code = errno;
  if (fd >= 0) ::close(fd);
  if (!good) refuse("write", folder, code);
}

void rename_durably(const Path& from, const Path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) refuse("rename to", to, errno);
  sync_folder(to.parent_path());
}

void replace_durably(const Path& from, const Path& to) {
  if (!std::filesystem::exists(to)) return rename_durably(from, to);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
    refuse("replace", to, errno);
  sync_folder(to.parent_path());
}

void make_folder(const Path& folder) {
  std::error_code code;
  std::filesystem::create_directories(folder, code);
  if (code) refuse("create", folder, code.value());
}

FolderLock::FolderLock(const Path& folder) {
  const Path path = folder / ".lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) refuse("create", path, errno);
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;  // not every disk can
  ::close(fd_);
  fail(Kind::Usage, "another process is saving to '", folder.string(),
       "'; wait for it, or choose another run.name");
}

FolderLock::~FolderLock() { ::close(fd_); }

void remove_folder(const Path& folder) {
  const Path gone = folder.parent_path() / (".gone." + folder.filename().string());
  std::error_code code;
  std::filesystem::remove_all(gone, code);
  std::filesystem::rename(folder, gone, code);
  if (!code) std::filesystem::remove_all(gone, code);
  if (code) refuse("remove", folder, code.value());
}

}  // namespace yoke::checkpoint
