// SPDX-License-Identifier: Apache-2.0
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstring>

#include "yoke/base/text.h"
#include "yoke/serve/rest_body.h"

namespace yoke::serve {
namespace {

// `text` is UTF-8.
void append_string(std::string& out, std::string_view text) {
  out += '"';
  size_t done = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    out.append(text, done, i - done);
    done = i + 1;
    constexpr const char* kHex = "0123456789abcdef";
    if (c >= 0x20)
      out.append({'\\', char(c)});
    else
      out.append({'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]});
  }
  out.append(text, done);
  out += '"';
}

std::string as_utf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const size_t size = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    const auto whole = text.substr(0, size);
    const bool valid = simdjson::validate_utf8(whole);
    out += valid ? whole : "\xef\xbf\xbd";  // U+FFFD
    text.remove_prefix(valid ? whole.size() : 1);
  }
  return out;
}

void append_number(std::string& out, std::integral auto value) {
  std::array<char, 24> text;
  out.append(text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr);
}

void append_number(std::string& out, bool value) { out += value ? "true" : "false"; }

void append_number(std::string& out, std::floating_point auto value) {
  if (!std::isfinite(value)) {
    out += std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
    return;
  }
  std::array<char, 32> text;
  char* const end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  out.append(text.data(), end);
  // A reader that took it for a whole number would lose the sign of -0.
  if (std::none_of(text.data(), end, [](char c) { return c == '.' || c == 'e'; })) out += ".0";
}

template <typename T>
void append_numbers(std::string& out, const Tensor& output) {
  const auto data = output.data;
  out.reserve(out.size() + data.size() * 3);
  for (size_t at = 0; at + sizeof(T) <= data.size(); at += sizeof(T)) {
    // What a model gives as a bool may be any byte.
    std::conditional_t<std::is_same_v<T, bool>, uint8_t, T> value;
    std::memcpy(&value, data.data() + at, sizeof(T));
    if (at > 0) out += ',';
    append_number(out, T(value));
  }
}

void append_strings(std::string& out, const Tensor& output) {
  for (auto data = output.data; !data.empty();) {
    uint32_t size = 0;
    std::memcpy(&size, data.data(), std::min(sizeof(size), data.size()));
    if (data.size() < sizeof(size) || size > data.size() - sizeof(size))
      refuse(Status::Internal, "output '", output.name, "': the model gave bytes that are no ",
             "elements with their lengths");
    const auto text = data.substr(sizeof(size), size);
    if (!simdjson::validate_utf8(text))
      refuse(Status::Invalid, "output '", output.name, "': wanted as JSON, got bytes that are not ",
             "UTF-8; ask for it as binary (\"binary_data\":true)");
    if (data.data() != output.data.data()) out += ',';
    append_string(out, text);
    data.remove_prefix(sizeof(size) + size);
  }
}

using Append = void(std::string& out, const Tensor& output);
constexpr std::array<Append*, 14> kAppend{append_numbers<bool>,
                                          append_numbers<uint8_t>,
                                          append_numbers<uint16_t>,
                                          append_numbers<uint32_t>,
                                          append_numbers<uint64_t>,
                                          append_numbers<int8_t>,
                                          append_numbers<int16_t>,
                                          append_numbers<int32_t>,
                                          append_numbers<int64_t>,
                                          nullptr,
                                          append_numbers<float>,
                                          append_numbers<double>,
                                          nullptr,
                                          append_strings};  // as Type's

void append_data(std::string& out, const Tensor& output) {
  const auto append = kAppend[size_t(output.type)];
  if (append == nullptr)
    refuse(Status::Invalid, "output '", output.name, "': wanted as JSON, got ",
           plan::type_name(output.type),
           ", which JSON has not; ask for it as binary (\"binary_data\":true)");
  append(out, output);
}

void append_head(std::string& out, const Answer& answer) {
  out += "{\"model_name\":";
  append_string(out, answer.model);
  out += ",\"model_version\":";
  append_string(out, answer.version);
  if (answer.id.empty()) return;
  out += ",\"id\":";
  append_string(out, answer.id);
}

void append_output(std::string& out, const Tensor& output, bool binary) {
  out += "{\"name\":";
  append_string(out, output.name);
  out += ",\"datatype\":\"";
  out += plan::type_name(output.type);
  out += "\",\"shape\":[";
  for (size_t i = 0; i < output.shape.size(); ++i) {
    if (i > 0) out += ',';
    append_number(out, output.shape[i]);
  }
  if (binary) {
    out += "],\"parameters\":{\"binary_data_size\":";
    append_number(out, output.data.size());
    out += "}}";
  } else {
    out += "],\"data\":[";
    append_data(out, output);
    out += "]}";
  }
}

const Tensor& find_output(const Answer& answer, const std::string& name) {
  const auto found = std::ranges::find(answer.outputs, name, &Tensor::name);
  if (found != answer.outputs.end()) return *found;
  std::vector<std::string> names;
  for (const auto& output : answer.outputs) names.push_back(output.name);
  refuse(Status::Invalid, "model '", answer.model, "' gives no output '", name, "'; it gives ",
         join(names, ", "));
}

}  // namespace

RestAnswer write_answer(const Answer& answer, const std::vector<WantedOutput>& outputs,
                        bool binary_output) {
  RestAnswer result;
  append_head(result.body, answer);
  result.body += ",\"outputs\":[";
  std::vector<std::string_view> blobs;
  const auto add = [&](const Tensor& output, bool binary) {
    if (result.body.back() == '}') result.body += ',';
    append_output(result.body, output, binary);
    if (binary) blobs.push_back(output.data);
  };
  for (const auto& wanted : outputs) add(find_output(answer, wanted.name), wanted.binary);
  if (outputs.empty())
    for (const auto& output : answer.outputs) add(output, binary_output);
  result.body += "]}";
  if (blobs.empty()) return result;

  result.json_bytes = result.body.size();
  size_t bytes = result.body.size();
  for (const auto blob : blobs) bytes += blob.size();
  result.body.reserve(bytes);
  for (const auto blob : blobs) result.body += blob;
  return result;
}

std::string write_error(std::string_view text) {
  std::string out = "{\"error\":";
  append_string(out, as_utf8(text));
  return out += '}';
}

std::string write_generated(const Answer& answer, std::string_view text) {
  std::string out;
  append_head(out, answer);
  out += ",\"text_output\":";
  append_string(out, as_utf8(text));
  return out += '}';
}

}  // namespace yoke::serve
