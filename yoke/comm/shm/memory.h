// SPDX-License-Identifier: Apache-2.0
// Memory that all processes of a world can map: memfd segments, each made by one process and opened
// by the others through /proc/PID/fd/FD when they first meet a place in it. A list of the segments
// lies in the first of them, the root. Owns: the mappings, and the descriptors of its own segments.
// Threads: all ranks of the process.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "yoke/base/mutex.h"
#include "yoke/comm/world.h"
#include "yoke/net/socket.h"

namespace yoke::comm {

// A place in shared memory, the same for every process. Segment 0 with offset 0: no place.
struct Location {
  uint32_t segment = 0;
  uint64_t offset = 0;
  explicit operator bool() const { return segment != 0 || offset != 0; }
};

class SharedMemory {
 public:
  // Collective over the processes of the world, which meet in its store.
  static std::shared_ptr<SharedMemory> open(std::shared_ptr<World> world, size_t root_bytes);
  ~SharedMemory();

  // The root's memory after the list of segments, zero at the start.
  void* root() const;
  // Memory of this process, at a multiple of 64 bytes; what it holds is undefined.
  void* allocate(size_t bytes);
  void free(void* memory);
  // Where something lies that this process allocated; nothing if it is elsewhere.
  std::optional<Location> locate(const void* memory, size_t bytes) const;
  void* address(Location location);

 private:
  struct Entry {                  // in the list of segments
    std::atomic<uint64_t> bytes;  // 0: not there yet; set last
    int64_t process;
    int32_t descriptor;
  };
  struct List;
  struct Segment {
    char* begin = nullptr;
    size_t bytes = 0;
    net::Descriptor descriptor = net::Descriptor();
  };

  explicit SharedMemory(std::shared_ptr<World> world) : world_(std::move(world)) {}
  static Segment make_segment(size_t bytes);
  static Segment map_segment(int64_t process, int descriptor, size_t bytes);
  uint32_t add_segment(size_t bytes) YOKE_REQUIRES(mutex_);

  const std::shared_ptr<World> world_;
  List* list_ = nullptr;
  mutable Mutex mutex_;
  std::map<uint32_t, Segment> segments_ YOKE_GUARDED_BY(mutex_);  // those mapped here
  std::map<const char*, uint32_t> own_ YOKE_GUARDED_BY(mutex_);   // begin -> segment
  std::map<char*, size_t> unused_ YOKE_GUARDED_BY(mutex_), used_ YOKE_GUARDED_BY(mutex_);
};

}  // namespace yoke::comm
