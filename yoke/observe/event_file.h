// SPDX-License-Identifier: Apache-2.0
// Scalars for TensorBoard: one event file in the folder of a run. A run that resumes makes a new
// file in the same folder; TensorBoard reads them as one run. Wall times are seconds since 1970.
// What cannot be written is an error (Kind::Io) of the call that met it, and is tried again by the
// next one.
//
// Owns: the file. Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace yoke::observe {

class EventFile {
 public:
  // Makes `events.out.tfevents.<seconds>.<host>.<pid>.<n>`; the folder must be there.
  EventFile(const std::string& folder, double wall_seconds);
  // Writes what is left, and is silent if it cannot: flush first to hear of an error.
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // The tag is UTF-8; TensorBoard groups by what is before its first slash. The value is kept as a
  // float. Values wait in memory for flush(), or until they are many.
  void scalar(std::string_view tag, int64_t step, double value, double wall_seconds);
  void flush();
  const std::string& path() const { return path_; }

 private:
  EventFile() = default;
  std::string path_;
  std::string pending_;  // records, or what is left of them, that are not in the file yet
  int file_ = -1;
};

}  // namespace yoke::observe
