// SPDX-License-Identifier: Apache-2.0
// The bodies of REST: requests from JSON with the bytes of tensors behind it, answers to the same.
// It takes what Triton takes, but for what would change silently: a number that does not fit its
// datatype is refused, and so is a field of the wrong kind. JSON has no NaN and no infinity: none
// is read, while answers say NaN, Infinity and -Infinity as Triton's do; binary has them both ways.
// Nothing that comes may do more than throw Refused.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/serve/facts.h"
#include "yoke/serve/request.h"

namespace simdjson::dom {
class parser;
}

namespace yoke::serve {

inline constexpr size_t kMaxJsonBytes = 64 << 20;  // more is worth sending as binary
inline constexpr size_t kMaxNameBytes = 200;       // of tensors, ids, sequences and streams

// Threads: one each, as it keeps its memory. A body whose string has room for 64 bytes after the
// JSON is read where it lies, any other is copied first.
class RestReader {
 public:
  RestReader();
  ~RestReader();
  RestReader(const RestReader&) = delete;
  RestReader& operator=(const RestReader&) = delete;

  // `json_bytes`: Inference-Header-Content-Length, where it was sent. Binary tensors stay in
  // `body`.
  Request read_infer(std::shared_ptr<const std::string> body, std::optional<int64_t> json_bytes);
  // The body is the one input of the model, and has no JSON. One row, where the model has rows.
  Request read_raw(std::shared_ptr<const std::string> body, const Facts& facts);
  // {"text_input":…} and, beside it or in "parameters", max_tokens, temperature, top_k, top_p,
  // seed.
  Request read_generate(const std::string& body);
  // {"ready":bool} or nothing.
  bool read_index(const std::string& body);
  // Of the request read last, also where it was refused after that; empty after forget_id().
  const std::string& id() const { return id_; }
  void forget_id() { id_.clear(); }

 private:
  std::string id_ = {};
  std::unique_ptr<simdjson::dom::parser> parser_;
};

struct RestAnswer {
  std::string body = {};
  std::optional<size_t> json_bytes = {};  // set where binary tensors follow
};
// `outputs` in this order, each as it says; where there are none, all, binary or not. Throws
// Refused where JSON cannot say it: halves, and bytes that are not UTF-8.
RestAnswer write_answer(const Answer& answer, const std::vector<WantedOutput>& outputs,
                        bool binary_output);
// What is not UTF-8 in the text becomes U+FFFD.
std::string write_error(std::string_view text);
std::string write_generated(const Answer& answer, std::string_view text);

}  // namespace yoke::serve
