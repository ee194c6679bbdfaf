// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/access_log.h"

#include <cerrno>
#include <cstring>
#include <stop_token>

#include "yoke/base/error.h"

namespace yoke::serve {
namespace {

constexpr size_t kMostBytes = 16 << 20;

}  // namespace

AccessLog::AccessLog(const std::string& path) {
  if (path.empty()) return;
  file_ = path == "-" ? stderr : std::fopen(path.c_str(), "ae");
  if (!file_) fail(Kind::Io, "cannot write the access log '", path, "': ", std::strerror(errno));
  thread_ = std::jthread([this](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      flush();
      const MutexLock lock(mutex_);
      changed_.wait_for(mutex_, std::chrono::milliseconds(100),
                        [&] { return stop.stop_requested(); });
    }
  });
}

AccessLog::~AccessLog() {
  if (!file_) return;
  thread_.request_stop();
  changed_.notify_all();
  thread_.join();
  flush();
  if (file_ != stderr) std::fclose(file_);
}

void AccessLog::write(std::string_view line) {
  const MutexLock lock(mutex_);
  if (waiting_.size() + line.size() > kMostBytes) {
    ++left_out_;
    return;
  }
  waiting_ += line;
  waiting_ += '\n';
}

void AccessLog::flush() {
  std::string lines;
  size_t left_out = 0;
  {
    const MutexLock lock(mutex_);
    lines.swap(waiting_);
    std::swap(left_out, left_out_);
  }
  if (left_out > 0) lines += cat("{\"left_out\":", left_out, "}\n");
  if (lines.empty()) return;
  std::fwrite(lines.data(), 1, lines.size(), file_);
  std::fflush(file_);
}

}  // namespace yoke::serve
