// SPDX-License-Identifier: Apache-2.0
// JSON for machines that read us: values, objects whose fields keep their order, and a writer of
// one object per line. Writing only. The text is always valid JSON: what is not UTF-8 in a string
// becomes U+FFFD, NaN and infinity become null, and numbers read back as the same number.
//
//   lines.write(JsonObject({{"step", 3}, {"loss", 2.5}, {"devices", names}}));
#pragma once

#include <concepts>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/base/mutex.h"

namespace yoke::observe {

class JsonObject;

// The text as a JSON string, with its quotes.
std::string json_quote(std::string_view text);
std::string json_number(float value);
std::string json_number(double value);

// One value, already in its JSON form.
class Json {
 public:
  Json(std::nullptr_t) : text_("null") {}
  Json(std::same_as<bool> auto value) : text_(value ? "true" : "false") {}
  Json(std::integral auto value) requires(!std::same_as<decltype(value), bool>)
      : text_(std::to_string(value)) {}
  Json(std::floating_point auto value) : text_(json_number(value)) {}
  Json(const char* value) : text_(json_quote(value)) {}
  Json(std::string_view value) : text_(json_quote(value)) {}
  Json(const std::string& value) : text_(json_quote(value)) {}
  Json(const JsonObject& value);

  template <typename T>
  Json(const std::vector<T>& values) : text_("[") {
    for (const auto& value : values) {
      if (text_.size() > 1) text_ += ',';
      text_ += Json(T(value)).text();
    }
    text_ += ']';
  }

  // Text that is JSON already.
  static Json raw(std::string text) {
    Json json(nullptr);
    json.text_ = std::move(text);
    return json;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

struct JsonField {
  std::string_view key;
  Json value;
};

class JsonObject {
 public:
  JsonObject() = default;
  JsonObject(std::initializer_list<JsonField> fields) {
    for (const auto& field : fields) add(field.key, field.value);
  }

  // Does not look for an earlier field of the same name.
  JsonObject& add(std::string_view key, const Json& value);
  std::string text() const { return '{' + fields_ + '}'; }
  const std::string& fields() const { return fields_; }  // the text without its braces

 private:
  std::string fields_;
};

// Threads: any; lines do not mix.
class JsonLines {
 public:
  explicit JsonLines(std::ostream& out) : out_(out) {}
  // The line is flushed: a reader sees it now, and a full disk is an error (Kind::Io) now.
  void write(const JsonObject& object);

 private:
  Mutex mutex_;
  std::ostream& out_ YOKE_GUARDED_BY(mutex_);
};

}  // namespace yoke::observe
