// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <algorithm>
#include <mutex>
#include <string>

namespace yoke::observe {
namespace {

constexpr const char* kTextPattern = "%Y-%m-%dT%H:%M:%S.%eZ %^%-7l%$ %v";
constexpr const char* kJsonPattern = R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})";

class FunctionSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FunctionSink(std::function<void(std::string_view)> function)
      : function_(std::move(function)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    function_({line.data(), line.size()});
  }
  void flush_() override {}

  std::function<void(std::string_view)> function_;
};

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::Debug:
      return spdlog::level::debug;
    case Level::Info:
      return spdlog::level::info;
    case Level::Warning:
      return spdlog::level::warn;
    case Level::Error:
      return spdlog::level::err;
    case Level::Off:
      break;
  }
  return spdlog::level::off;
}

// A string is written bare when nobody could misread it.
std::string field_text(const Json& value) {
  const std::string& text = value.text();
  const bool bare =
      text.size() > 2 && text.front() == '"' && text.find_first_of(" =\\", 0) == std::string::npos;
  return bare ? text.substr(1, text.size() - 2) : text;
}

}  // namespace

struct Log::Impl {
  LogOptions options;
  std::unique_ptr<spdlog::logger> logger;
};

Log::Log(LogOptions options, int rank) : rank_(rank) {
  spdlog::sink_ptr sink;
  const bool own = bool(options.sink);
  if (own)
    sink = std::make_shared<FunctionSink>(options.sink);
  else
    sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  // The formatter ends a line for a file; a function gets it without.
  sink->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      options.json ? kJsonPattern : kTextPattern, spdlog::pattern_time_type::utc,
      own ? "" : spdlog::details::os::default_eol));
  auto logger = std::make_unique<spdlog::logger>("yoke", std::move(sink));
  logger->set_level(spdlog::level::trace);
  logger->flush_on(spdlog::level::trace);
  impl_ = std::make_shared<const Impl>(Impl{std::move(options), std::move(logger)});
}

Log Log::for_rank(int rank) const {
  Log log = *this;
  log.rank_ = rank;
  return log;
}

bool Log::speaks(Level level) const {
  const auto& options = impl_->options;
  const Level least = rank_ <= 0 ? options.level : std::max(options.level, options.other_ranks);
  return level >= least && level != Level::Off;
}

void Log::write(Level level, std::string_view message, Fields fields) const {
  if (!speaks(level)) return;
  std::string text;
  if (impl_->options.json) {
    JsonObject object{{"rank", rank_}, {"message", message}};
    for (const auto& field : fields) object.add(field.key, field.value);
    text = object.fields();
  } else {
    if (rank_ >= 0) text = "rank " + std::to_string(rank_) + ": ";
    text += message;
    const char* separator = "  ";
    for (const auto& field : fields) {
      text += separator + std::string(field.key) + '=' + field_text(field.value);
      separator = " ";
    }
  }
  impl_->logger->log(impl_->options.now(), spdlog::source_loc{}, to_spdlog(level), text);
}

}  // namespace yoke::observe
