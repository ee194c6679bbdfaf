// SPDX-License-Identifier: Apache-2.0
// A timeline of what every thread did. A null tracer means tracing is off, at the cost of one
// comparison a span. Each thread writes into a ring of its own, without locks; a full ring
// overwrites its oldest spans, so that memory is bounded and the trace shows the end of the run.
//
//   Span span(tracer, "forward", Category::Compute);    // until the end of the block
//
// Owns: all tracks, also those of threads that have ended; not the clock. Threads: any.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/base/mutex.h"

namespace yoke::observe {

enum class Category : uint8_t { Compute, Comm, Wait, Data };

class Tracer {
 public:
  // A thread that traces takes 32 bytes for each of its spans, at once with its first.
  explicit Tracer(const Clock& clock, size_t spans_per_thread = 1 << 15);
  ~Tracer();

  // Names the track of the calling thread. Rank -1: a thread that belongs to no rank.
  void name_thread(int rank, std::string name);
  // A copy of the name that lives as long as the tracer, for span names that are made at run time.
  const char* intern(const std::string& name);

  // Notes a span on the track of the calling thread; `name` must outlive the tracer.
  void record(const char* name, Category category, Time begin, Time end);
  Time now() const { return clock_.now(); }

  // The spans that have ended, as JSON that Perfetto and chrome://tracing open: one process for
  // each rank, one track for each thread. Times are the clock's own, in microseconds. May be
  // called while others record. Those that began before `since` are left out.
  void write_chrome_trace(std::ostream& out, Time since = Time::min()) const;
  uint64_t num_overwritten() const;

 private:
  struct Track;
  Track& track();

  const Clock& clock_;
  const size_t capacity_;
  const uint64_t id_;  // never used again, unlike an address
  mutable Mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Track>> tracks_ YOKE_GUARDED_BY(mutex_);  // by thread
  std::set<std::string> names_ YOKE_GUARDED_BY(mutex_);
};

class Span {
 public:
  Span(Tracer* tracer, const char* name, Category category = Category::Compute)
      : tracer_(tracer), name_(name), category_(category) {
    if (tracer_) begin_ = tracer_->now();
  }
  ~Span() {
    if (tracer_) tracer_->record(name_, category_, begin_, tracer_->now());
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Tracer* tracer_;
  const char* name_;
  Category category_;
  Time begin_;
};

}  // namespace yoke::observe
