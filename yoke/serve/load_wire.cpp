// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/load_wire.h"

#include <charconv>
#include <cstring>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/plan/port.h"

namespace yoke::serve {
namespace {

template <typename T>
void append(std::string& text, T value) {
  char buffer[32];
  text.append(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
}

template <typename Values>
void append_list(std::string& text, const Values& values) {
  text += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += ',';
    append(text, values[i]);
  }
  text += ']';
}

std::string_view bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

void write_parameters(const Question& question, bool binary, std::string& text) {
  text += "\"parameters\":{";
  const size_t begin = text.size();
  if (binary) text += ",\"binary_data_output\":true";
  if (!question.stream.empty()) text += ",\"yoke_stream\":\"" + question.stream + '"';
  if (question.timeout_us > 0) append(text += ",\"timeout\":", question.timeout_us);
  if (text.size() > begin) text.erase(begin, 1);
  text += "},";
}

}  // namespace

const char* to_text(Wire wire) { return wire == Wire::Json ? "JSON" : "binary"; }

void fill(Question& question, uint64_t number, std::vector<int64_t> shape) {
  question.shape = std::move(shape);
  const Rng rng(number, "question");
  question.values.resize(size_t(plan::num_elements(question.shape).value_or(0)));
  for (size_t i = 0; i < question.values.size(); ++i)
    question.values[i] = float(rng.bits(i) % 8192) / 8;
}

void write_question(const Question& question, Wire wire, LoadRequest& request) {
  request.rows = question.shape.empty() ? 1 : question.shape[0];
  const bool binary = wire == Wire::Binary;
  request.path.assign("/v2/models/").append(question.model).append("/infer");
  auto& body = request.body;
  body = "{";
  if (!question.id.empty()) body += "\"id\":\"" + question.id + "\",";
  if (binary || !question.stream.empty() || question.timeout_us > 0)
    write_parameters(question, binary, body);
  append_list(body += "\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":",
              question.shape);
  if (binary) {
    const auto bytes = bytes_of(question.values);
    append(body += ",\"parameters\":{\"binary_data_size\":", bytes.size());
    body += "}}]}";
    request.headers =
        "Content-Type: application/octet-stream\r\n"
        "Inference-Header-Content-Length: ";
    append(request.headers, body.size());
    request.headers += "\r\n";
    body += bytes;
  } else {
    append_list(body += ",\"data\":", question.values);
    body += "}]}";
    request.headers = "Content-Type: application/json\r\n";
  }
}

bool read_values(std::string_view body, Wire wire, std::span<float> values) {
  if (wire == Wire::Binary) {
    if (body.size() < values.size_bytes() || !body.starts_with('{')) return false;
    std::memcpy(values.data(), body.data() + body.size() - values.size_bytes(),
                values.size_bytes());
    return body[body.size() - values.size_bytes() - 1] == '}';
  }
  constexpr std::string_view kData = "\"data\":";
  const size_t at = body.find(kData);
  if (at == body.npos) return false;
  const char *next = body.data() + at + kData.size(), *const end = body.data() + body.size();
  const auto skip = [&] {
    while (next < end && (*next == '[' || *next == ',' || *next == ' ')) ++next;
  };
  for (auto& value : values) {
    skip();
    const auto read = std::from_chars(next, end, value);
    if (read.ec != std::errc()) return false;
    next = read.ptr;
  }
  return next < end && *next == ']';
}

}  // namespace yoke::serve
