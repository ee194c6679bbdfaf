// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "yoke/base/text.h"

namespace yoke::comm {
namespace {

constexpr uint32_t kMaxSegments = 4096;
constexpr size_t kSegmentBytes = size_t{64} << 20;  // of small blocks; pages come when touched
constexpr size_t kAlignment = 64, kLargeAlignment = size_t{2} << 20;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

struct SharedMemory::List {
  std::atomic<uint32_t> count;  // entries taken
  std::array<Entry, kMaxSegments> entries;
};

std::shared_ptr<SharedMemory> SharedMemory::open(std::shared_ptr<World> shared_world,
                                                 size_t root_bytes) {
  World& world = *shared_world;
  std::shared_ptr<SharedMemory> memory(new SharedMemory(std::move(shared_world)));
  MutexLock lock(memory->mutex_);
  const size_t bytes = round_up(sizeof(List), kAlignment) + root_bytes;
  Segment root;
  Store& store = world.store();
  if (world.here(0)) {
    root = make_segment(bytes);
    reinterpret_cast<List*>(root.begin)->count.store(1);  // the root itself
    store.set("shm/root", cat(::getpid(), " ", root.descriptor.get()));
  } else {
    const auto words = split(store.get("shm/root", world.timeout()), ' ');
    YOKE_CHECK(words.size() == 2);
    root = map_segment(*parse_int(words[0]), int(*parse_int(words[1])), bytes);
  }
  // The root's process may end early: it stays until all have opened it.
  if (store.add("shm/opened", world.num_here()) == world.size()) store.set("shm/all_opened", "");
  if (world.here(0)) store.get("shm/all_opened", world.timeout());
  memory->list_ = reinterpret_cast<List*>(root.begin);
  memory->segments_[0] = std::move(root);
  return memory;
}

SharedMemory::~SharedMemory() {
  MutexLock lock(mutex_);
  for (auto& [number, segment] : segments_) ::munmap(segment.begin, segment.bytes);
}

void* SharedMemory::root() const {
  return reinterpret_cast<char*>(list_) + round_up(sizeof(List), kAlignment);
}

SharedMemory::Segment SharedMemory::make_segment(size_t bytes) {
  net::Descriptor descriptor(::memfd_create("yoke", MFD_CLOEXEC));
  if (!descriptor || ::ftruncate(descriptor.get(), off_t(bytes)) != 0)
    fail(Kind::Device, "cannot make ", bytes_text(bytes),
         " of shared memory: ", std::strerror(errno));
  void* begin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (begin == MAP_FAILED)
    fail(Kind::Device, "cannot map ", bytes_text(bytes),
         " of shared memory: ", std::strerror(errno));
  ::madvise(begin, bytes, MADV_HUGEPAGE);  // a wish, which the system may refuse
  return {static_cast<char*>(begin), bytes, std::move(descriptor)};
}

SharedMemory::Segment SharedMemory::map_segment(int64_t process, int descriptor, size_t bytes) {
  const std::string path = cat("/proc/", process, "/fd/", descriptor);
  const net::Descriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  void* begin = opened ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened.get(), 0)
                       : MAP_FAILED;
  if (begin == MAP_FAILED)
    fail(Kind::Comm, "cannot share memory with process ", process, " (", path,
         "): ", std::strerror(errno),
         "; the processes must run on one host, as one user, in one container");
  ::madvise(begin, bytes, MADV_HUGEPAGE);
  return {static_cast<char*>(begin), bytes};
}

uint32_t SharedMemory::add_segment(size_t bytes) {
  const uint32_t number = list_->count.fetch_add(1);
  if (number >= kMaxSegments)
    fail(Kind::Device, "out of shared segments (", kMaxSegments,
         " in this world); allocate fewer, larger buffers");
  Segment segment = make_segment(bytes);
  Entry& entry = list_->entries[number];
  entry.process = ::getpid();
  entry.descriptor = segment.descriptor.get();
  entry.bytes.store(bytes, std::memory_order_release);
  own_[segment.begin] = number;
  segments_[number] = std::move(segment);
  return number;
}

void* SharedMemory::allocate(size_t bytes) {
  const size_t block = round_up(std::max<size_t>(bytes, 1), kAlignment);
  MutexLock lock(mutex_);
  auto best = unused_.end();  // the smallest that is large enough
  for (auto it = unused_.begin(); it != unused_.end(); ++it)
    if (it->second >= block && (best == unused_.end() || it->second < best->second)) best = it;
  if (best == unused_.end()) {
    const size_t size = std::max(kSegmentBytes, round_up(block, kLargeAlignment));
    best = unused_.emplace(segments_[add_segment(size)].begin, size).first;
  }
  const auto [begin, size] = *best;
  unused_.erase(best);
  if (size > block) unused_.emplace(begin + block, size - block);
  used_[begin] = block;
  return begin;
}

void SharedMemory::free(void* memory) {
  MutexLock lock(mutex_);
  const auto found = used_.find(static_cast<char*>(memory));
  YOKE_CHECK(found != used_.end());
  auto merged = unused_.insert(*found).first;
  used_.erase(found);
  // Joined with what is unused before and after it in its segment.
  const auto join_next = [&](auto it) YOKE_REQUIRES(mutex_) {
    const auto next = std::next(it);
    if (next == unused_.end() || it->first + it->second != next->first ||
        own_.contains(next->first))
      return;
    it->second += next->second;
    unused_.erase(next);
  };
  join_next(merged);
  if (merged != unused_.begin()) join_next(std::prev(merged));
}

std::optional<Location> SharedMemory::locate(const void* memory, size_t bytes) const {
  const auto* begin = static_cast<const char*>(memory);
  MutexLock lock(mutex_);
  auto after = own_.upper_bound(begin);
  if (after == own_.begin()) return std::nullopt;
  const auto& [start, number] = *--after;
  if (begin + bytes > start + segments_.at(number).bytes) return std::nullopt;
  return Location{number, uint64_t(begin - start)};
}

void* SharedMemory::address(Location location) {
  if (!location) return nullptr;
  MutexLock lock(mutex_);
  auto& segment = segments_[location.segment];
  if (segment.begin == nullptr) {
    const Entry& entry = list_->entries[location.segment];
    const uint64_t bytes = entry.bytes.load(std::memory_order_acquire);
    YOKE_CHECK(bytes > 0, "segment ", location.segment);
    try {
      segment = map_segment(entry.process, entry.descriptor, bytes);
    } catch (const Error&) {  // its process may be gone, and that is what there is to say
      if (world_->failed_soon()) world_->raise(-1);
      throw;
    }
  }
  return segment.begin + location.offset;
}

}  // namespace yoke::comm
