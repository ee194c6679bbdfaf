// SPDX-License-Identifier: Apache-2.0
// What must hold for any bytes that come as a body: they are read or refused, and what was read and
// is written as an answer reads back to the same tensors. Breaking that throws something else than
// Refused. For the tests and for fuzz/rest_fuzz.cpp.
#pragma once

#include "yoke/serve/check.h"
#include "yoke/serve/compression.h"
#include "yoke/serve/rest_body.h"

namespace yoke::serve {

inline Answer answer_of(std::vector<Tensor> outputs, const std::string& id = "") {
  Answer answer;
  answer.model = "m";
  answer.version = "1";
  answer.id = id;
  answer.outputs = std::move(outputs);
  return answer;
}

// As if the answer's outputs were sent again as inputs.
inline std::shared_ptr<const std::string> sent_back(RestAnswer& answer) {
  const std::string_view outputs = "\"outputs\":[";
  answer.body.replace(answer.body.find(outputs), outputs.size(), "\"inputs\" :[");
  return std::make_shared<const std::string>(answer.body);
}

inline void check_same(const std::vector<Tensor>& got, const std::vector<Tensor>& wanted) {
  YOKE_CHECK(got.size() == wanted.size(), "got ", got.size(), " tensors of ", wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    YOKE_CHECK(got[i].name == wanted[i].name && got[i].type == wanted[i].type &&
                   got[i].shape == wanted[i].shape && got[i].data == wanted[i].data,
               "tensor '", wanted[i].name, "' changed on its way");
}

inline void try_answer(RestReader& reader, const Request& request) {
  const auto answer = answer_of(request.inputs, request.id);
  auto binary = write_answer(answer, {}, true);
  const auto size = binary.json_bytes ? std::optional<int64_t>(*binary.json_bytes) : std::nullopt;
  check_same(reader.read_infer(sent_back(binary), size).inputs, request.inputs);
  RestAnswer text;
  try {
    text = write_answer(answer, {}, false);
  } catch (const Refused&) {
    return;  // halves, and bytes that are not UTF-8
  }
  if (text.body.find("NaN") != text.body.npos || text.body.find("Infinity") != text.body.npos)
    return;
  for (const auto& input : request.inputs)  // a bool may come as any byte, and goes as one of two
    if (input.type == Type::Bool) return;
  check_same(reader.read_infer(sent_back(text), std::nullopt).inputs, request.inputs);
}

template <typename Read>
bool taken(const Read& read) {
  try {
    read();
    return true;
  } catch (const Refused& refused) {
    YOKE_CHECK(!refused.outcome.ok() && !refused.outcome.text.empty());
    write_error(refused.outcome.text);
    return false;
  }
}

// All readers try it. Where JSON would end before binary tensors is at its last brace.
inline void try_body(RestReader& reader, std::string_view bytes) {
  const Facts facts{.inputs = {{.name = "x", .type = Type::Fp32, .shape = {{}, {4, 4}}}},
                    .batch = 8};
  const auto body = std::make_shared<const std::string>(bytes);
  const auto infer = [&](std::optional<int64_t> json_bytes) {
    std::optional<Request> request;
    if (!taken([&] { request = reader.read_infer(body, json_bytes); })) return;
    if (taken([&] {
          for (const auto& input : request->inputs) {  // sizes are the next one's to check
            Facts one{.inputs = {{.name = input.name, .type = input.type}}};
            for (const auto size : input.shape) one.inputs[0].shape.push_back({size, size});
            Request alone{.inputs = {input}};
            check_request("m", one, alone);
          }
        }))
      try_answer(reader, *request);
    taken([&] { check_request("m", facts, *request); });
  };
  infer(std::nullopt);
  infer(int64_t(bytes.rfind('}') + 1));
  taken([&] {
    auto request = reader.read_raw(body, facts);
    check_request("m", facts, request);
    try_answer(reader, request);
  });
  taken([&] { reader.read_generate(*body); });
  taken([&] { reader.read_index(*body); });
  taken([&] {
    const auto plain = inflate(bytes, 1 << 16);
    YOKE_CHECK(inflate(deflate(plain, bytes.size() % 2 == 0), plain.size()) == plain);
    reader.read_infer(std::make_shared<const std::string>(plain), std::nullopt);
  });
}

}  // namespace yoke::serve
