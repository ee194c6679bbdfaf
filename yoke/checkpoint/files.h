// SPDX-License-Identifier: Apache-2.0
// Files that are there after a crash, or not at all. Errors are Kind::Io with the path and the
// system's reason.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace yoke::checkpoint {

using Path = std::filesystem::path;

// Owns: the descriptor; a file that was not finished is removed.
class DurableFile {
 public:
  explicit DurableFile(Path path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, size_t bytes);
  void finish();  // on the disk, with its bytes

 private:
  const Path path_;
  int fd_ = -1;
};

// All or nothing: under another name first.
void write_durably(const Path& path, const std::string& text);
std::string read_text(const Path& path);
// New names in the folder are on the disk.
void sync_folder(const Path& folder);
void rename_durably(const Path& from, const Path& to);
// For folders: what `to` was, if it was there, is `from` now. There is always one at `to`.
void replace_durably(const Path& from, const Path& to);
void make_folder(const Path& folder);
// Held by one process while it lives: FOLDER/.lock. Throws Kind::Usage if another has it.
class FolderLock {
 public:
  explicit FolderLock(const Path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};
// Nobody sees half of it: it is renamed first.
void remove_folder(const Path& folder);

}  // namespace yoke::checkpoint
