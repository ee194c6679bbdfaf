// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/trace.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ostream>

#include "yoke/base/error.h"
#include "yoke/observe/json_lines.h"

namespace yoke::observe {
namespace {

struct Event {
  const char* name;
  Category category;
  Time begin, end;
};

// An event that may be read while its owner overwrites it. Release and acquire on every word: a
// reader that got any word of a newer event also sees that the ring has come that far.
struct Slot {
  std::atomic<const char*> name;
  std::atomic<Category> category;
  std::atomic<Time> begin, end;

  void store(const Event& event) {
    name.store(event.name, std::memory_order_release);
    category.store(event.category, std::memory_order_release);
    begin.store(event.begin, std::memory_order_release);
    end.store(event.end, std::memory_order_release);
  }
  Event load() const {
    return {name.load(std::memory_order_acquire), category.load(std::memory_order_acquire),
            begin.load(std::memory_order_acquire), end.load(std::memory_order_acquire)};
  }
};

// The last `capacity` events of one writer, for any number of readers; nobody waits.
class Ring {
 public:
  explicit Ring(size_t capacity) : capacity_(capacity), slots_(capacity + 1) {}

  void push(const Event& event) {
    slots_[next_].store(event);
    if (++next_ == slots_.size()) next_ = 0;
    num_pushed_.store(num_pushed_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

  std::vector<Event> read() const {
    const uint64_t end = num_pushed_.load(std::memory_order_acquire);
    const uint64_t begin = end - std::min(end, capacity_);
    std::vector<Event> events;
    events.reserve(end - begin);
    for (uint64_t i = begin; i < end; ++i) events.push_back(slots_[i % slots_.size()].load());
    // The owner may have gone on meanwhile. It is writing event `now` at most, over the one that
    // lies capacity + 1 before: what came later than that was read whole.
    const uint64_t now = num_pushed_.load(std::memory_order_relaxed);
    const uint64_t intact = std::min(end, now - std::min(now, capacity_));
    events.erase(events.begin(), events.begin() + int64_t(intact - begin));
    return events;
  }

  uint64_t num_overwritten() const {
    const uint64_t pushed = num_pushed_.load(std::memory_order_acquire);
    return pushed - std::min(pushed, capacity_);
  }

 private:
  const uint64_t capacity_;
  std::vector<Slot> slots_;  // one more than the capacity: the one being written
  size_t next_ = 0;          // the owner's
  std::atomic<uint64_t> num_pushed_{0};
};

const char* to_string(Category category) {
  switch (category) {
    case Category::Compute:
      return "compute";
    case Category::Comm:
      return "comm";
    case Category::Wait:
      return "wait";
    case Category::Data:
      return "data";
  }
  return "";
}

// Nanoseconds as microseconds, with every digit.
std::string micros(Duration duration) {
  char text[40];
  const long long ns = duration.count();
  std::snprintf(text, sizeof text, "%lld.%03lld", ns / 1000, ns % 1000);
  return text;
}

// Numbers that are given out once in the life of the process.
uint64_t unique_number() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

}  // namespace

struct Tracer::Track {
  explicit Track(size_t capacity) : ring(capacity) {}
  int number = 0;
  int rank = -1;  // this and the name are guarded by the tracer's mutex
  std::string name;
  Ring ring;
};

Tracer::Tracer(const Clock& clock, size_t spans_per_thread)
    : clock_(clock), capacity_(spans_per_thread), id_(unique_number()) {}

Tracer::~Tracer() = default;

// A thread remembers the track of the tracer it used last; only the first span pays for the lock.
Tracer::Track& Tracer::track() {
  static thread_local uint64_t last_tracer = 0;
  static thread_local Track* last_track = nullptr;
  if (last_tracer == id_) [[likely]]
    return *last_track;

  static thread_local const uint64_t thread = unique_number();
  MutexLock lock(mutex_);
  auto& track = tracks_[thread];
  if (!track) {
    track = std::make_unique<Track>(capacity_);
    track->number = int(tracks_.size());
    track->name = cat("thread ", track->number);
  }
  last_tracer = id_;
  last_track = track.get();
  return *track;
}

void Tracer::record(const char* name, Category category, Time begin, Time end) {
  track().ring.push({name, category, begin, end});
}

void Tracer::name_thread(int rank, std::string name) {
  Track& mine = track();
  MutexLock lock(mutex_);
  mine.rank = rank;
  mine.name = std::move(name);
}

const char* Tracer::intern(const std::string& name) {
  MutexLock lock(mutex_);
  return names_.insert(name).first->c_str();
}

uint64_t Tracer::num_overwritten() const {
  MutexLock lock(mutex_);
  uint64_t sum = 0;
  for (const auto& [thread, track] : tracks_) sum += track->ring.num_overwritten();
  return sum;
}

void Tracer::write_chrome_trace(std::ostream& out, Time since) const {
  struct Source {
    int pid, tid;
    std::string process, name;
    const Ring* ring;
  };
  std::vector<Source> sources;
  {
    MutexLock lock(mutex_);
    for (const auto& [thread, track] : tracks_) {
      const int rank = track->rank;
      // Process 0 has a meaning of its own in Perfetto.
      sources.push_back({rank + 2, track->number, rank < 0 ? "no rank" : cat("rank ", rank),
                         track->name, &track->ring});
    }
  }
  const char* separator = "\n";
  auto write = [&](const JsonObject& object) {
    out << separator << object.text();
    separator = ",\n";
  };
  auto name_it = [&](const char* what, const Source& source, const std::string& name) {
    write({{"name", what},
           {"ph", "M"},
           {"pid", source.pid},
           {"tid", source.tid},
           {"args", JsonObject{{"name", name}}}});
  };
  out << R"({"displayTimeUnit":"ms","traceEvents":[)";
  for (const auto& source : sources) {
    name_it("process_name", source, source.process);
    name_it("thread_name", source, source.name);
    auto events = source.ring->read();
    std::erase_if(events, [&](const Event& event) { return event.begin < since; });
    // An outer span before the inner ones that begin with it.
    std::ranges::sort(events, [](const Event& a, const Event& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    for (const auto& event : events)
      write({{"name", event.name},
             {"cat", to_string(event.category)},
             {"ph", "X"},
             {"ts", Json::raw(micros(event.begin.time_since_epoch()))},
             {"dur", Json::raw(micros(event.end - event.begin))},
             {"pid", source.pid},
             {"tid", source.tid}});
  }
  out << "\n]}\n" << std::flush;
  if (!out) fail(Kind::Io, "cannot write the trace: the output is closed or the disk is full");
}

}  // namespace yoke::observe
