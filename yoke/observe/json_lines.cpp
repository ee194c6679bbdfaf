// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/json_lines.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ostream>

#include "yoke/base/error.h"

namespace yoke::observe {
namespace {

template <typename Float>
std::string shortest(Float value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

// How many bytes at the start of `text` are one well-formed UTF-8 character; 0 if none
// (Unicode 15, table 3-7: no overlong forms, no surrogates, nothing past U+10FFFF).
size_t character_bytes(std::string_view text) {
  auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : uint8_t{0}; };
  auto continues = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const uint8_t first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return continues(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const bool overlong = first == 0xE0 && second < 0xA0;
    const bool surrogate = first == 0xED && second > 0x9F;
    return !overlong && !surrogate && continues(1) && continues(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const bool overlong = first == 0xF0 && second < 0x90;
    const bool too_large = first == 0xF4 && second > 0x8F;
    return !overlong && !too_large && continues(1) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

void append_control(std::string& out, char c) {
  static constexpr char kDigits[] = "0123456789abcdef";
  switch (c) {
    case '\n':
      out += "\\n";
      break;
    case '\t':
      out += "\\t";
      break;
    case '\r':
      out += "\\r";
      break;
    default:
      out += "\\u00";
      out += kDigits[c >> 4 & 0xF];
      out += kDigits[c & 0xF];
  }
}

}  // namespace

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const char c = text.front();
    const size_t length = character_bytes(text);
    if (length == 0) {
      out += "\\ufffd";
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if ((c >= 0 && c < 0x20) || c == 0x7F) {
      append_control(out, c);
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out + '"';
}

std::string json_number(float value) { return shortest(value); }
std::string json_number(double value) { return shortest(value); }

Json::Json(const JsonObject& value) : text_(value.text()) {}

JsonObject& JsonObject::add(std::string_view key, const Json& value) {
  if (!fields_.empty()) fields_ += ',';
  fields_ += json_quote(key);
  fields_ += ':';
  fields_ += value.text();
  return *this;
}

void JsonLines::write(const JsonObject& object) {
  const std::string line = object.text() + '\n';
  MutexLock lock(mutex_);
  out_ << line << std::flush;
  if (!out_)
    fail(Kind::Io, "cannot write a line of JSON: the output is closed or the disk is full");
}

}  // namespace yoke::observe
