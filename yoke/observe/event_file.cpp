// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "yoke/base/crc32c.h"
#include "yoke/base/error.h"

namespace yoke::observe {
namespace {

constexpr size_t kPendingBytes = 64 << 10;  // as many wait for a flush

template <typename Unsigned>
std::string little_endian(Unsigned value) {
  std::string out;
  for (size_t i = 0; i < sizeof value; ++i) out += char(value >> 8 * i & 0xFF);
  return out;
}

std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += char((value & 0x7F) | 0x80);
  return out + char(value);
}

// Fields of a protobuf message: the number of the field with the type of its value, the value.
std::string field(int number, double value) {
  return char(number << 3 | 1) + little_endian(std::bit_cast<uint64_t>(value));
}
std::string field(int number, float value) {
  return char(number << 3 | 5) + little_endian(std::bit_cast<uint32_t>(value));
}
std::string field(int number, int64_t value) {
  return char(number << 3 | 0) + varint(uint64_t(value));
}
std::string field(int number, std::string_view value) {
  return (char(number << 3 | 2) + varint(value.size())).append(value);
}

// As TFRecord files hold a CRC: masked, because the CRC of data that holds its CRC checks little.
std::string checksum(std::string_view data) {
  const uint32_t crc = crc32c(data.data(), data.size());
  return little_endian(std::rotr(crc, 15) + 0xA282EAD8u);
}

std::string record(std::string_view event) {
  const std::string length = little_endian(uint64_t{event.size()});
  return (length + checksum(length)).append(event) + checksum(event);
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

}  // namespace

// Delegates, so that the destructor closes the file when the first flush throws.
EventFile::EventFile(const std::string& folder, double wall_seconds) : EventFile() {
  // TensorBoard reads the files of a folder in the order of their names: ten digits keep it.
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%010.0f", std::floor(wall_seconds));
  const std::string stem =
      cat("events.out.tfevents.", seconds, ".", host_name(), ".", ::getpid(), ".");
  for (int n = 0; file_ < 0; ++n) {
    path_ = std::filesystem::path(folder) / cat(stem, n);
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0 && errno != EEXIST && errno != EINTR)
      fail(Kind::Io, "cannot make the event file '", path_, "': ", std::strerror(errno));
  }
  pending_ = record(field(1, wall_seconds) + field(3, std::string_view("brain.Event:2")));
  flush();
}

EventFile::~EventFile() {
  try {
    flush();
  } catch (const Error&) {
  }
  if (file_ >= 0) ::close(file_);
}

// The numbers of the fields are those of tensorboard/compat/proto/{event,summary}.proto.
void EventFile::scalar(std::string_view tag, int64_t step, double value, double wall_seconds) {
  if (pending_.size() >= kPendingBytes) flush();  // first: a full disk does not fill the memory
  const std::string summary = field(1, field(1, tag) + field(2, float(value)));
  pending_ += record(field(1, wall_seconds) + field(2, step) + field(5, summary));
}

void EventFile::flush() {
  while (!pending_.empty()) {
    const ssize_t written = ::write(file_, pending_.data(), pending_.size());
    if (written >= 0)
      pending_.erase(0, size_t(written));
    else if (errno != EINTR)
      fail(Kind::Io, "cannot write the event file '", path_, "': ", std::strerror(errno));
  }
}

}  // namespace yoke::observe
