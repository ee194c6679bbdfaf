// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "yoke/base/error.h"

namespace yoke {

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info {};
  bool good = fd >= 0 && ::fstat(fd, &info) == 0;
  if (good && S_ISDIR(info.st_mode)) {
    errno = EISDIR;
    good = false;
  }
  size_ = good ? size_t(info.st_size) : 0;
  if (good && size_ > 0) {
    memory_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    good = memory_ != MAP_FAILED;
  }
  const int code = errno;
  if (fd >= 0) ::close(fd);
  if (!good) fail(Kind::Io, "cannot open '", path.string(), "': ", std::strerror(code));
}

MappedFile::~MappedFile() {
  if (memory_ != nullptr) ::munmap(memory_, size_);
}

}  // namespace yoke
