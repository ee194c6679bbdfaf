// SPDX-License-Identifier: Apache-2.0
// Saves what ranks have, while they go on. Each copies its pieces to host memory, which is all that
// it waits for, and writes them to a file of its own in a folder that nobody takes for a
// checkpoint; rank 0 waits for all of these files, makes the index and renames the folder. A crash
// or an error at any instant leaves the checkpoints before as they were.
//   FOLDER/step-00000100/index.json, rank-00000.safetensors, ...
// One Saver at a time for a folder, by a lock.
// Collective: save() and wait(), by all ranks; they need one file system. Threads: the rank's own.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "yoke/base/clock.h"
#include "yoke/checkpoint/piece.h"
#include "yoke/comm/communicator.h"

namespace yoke::checkpoint {

struct SaverOptions {
  int64_t keep = 2;  // of the newest, at least 1
  bool async = true;
  Duration timeout = std::chrono::seconds(300);  // for all ranks to have written
};

class Saver {
 public:
  Saver(Path folder, const comm::Communicator& comm, SaverOptions options = {});
  ~Saver();  // the last save is finished first

  // Every element of every tensor is in one piece of one rank, and the values are those of rank 0.
  // Waits for the save before, if that is still under way.
  void save(int64_t step, const Contents& contents);
  // Until the last save is committed: the same outcome on all ranks. Nothing: it is, or there was
  // none. Else why not.
  std::optional<std::string> wait();
  Duration held_up() const;  // by the last save()

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::checkpoint
