// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/check.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "yoke/base/text.h"
#include "yoke/serve/channel.h"

namespace yoke::serve {
namespace {

std::vector<std::string> names_of(const std::vector<Port>& ports) {
  std::vector<std::string> names;
  for (const auto& port : ports) names.push_back(port.name);
  return names;
}

template <typename Who>
void check_bytes(const Who& who, const Tensor& input) {
  const auto count = plan::num_elements(input.shape);
  if (!count || *count > INT32_MAX)
    refuse(Status::Invalid, who(), " has ", plan::to_text(input.type, input.shape),
           ", which is no shape of at most ", INT32_MAX, " elements");
  if (input.type == Type::Bytes) {
    const auto got = count_bytes_elements(input.data);
    if (got != *count)
      refuse(Status::Invalid, who(), ": wanted ", *count, " elements for ",
             plan::to_text(input.type, input.shape), ", got ",
             got ? cat(*got) : std::string("bytes that are no elements with their lengths"));
    return;
  }
  const size_t wanted = size_t(*count) * plan::size_of(input.type);
  if (input.data.size() != wanted)
    refuse(Status::Invalid, who(), ": wanted ", wanted, " bytes for ",
           plan::to_text(input.type, input.shape), ", got ", input.data.size());
}

}  // namespace

std::optional<int64_t> count_bytes_elements(std::string_view data) {
  int64_t count = 0;
  while (!data.empty()) {
    uint32_t size = 0;
    if (data.size() < sizeof(size)) return std::nullopt;
    std::memcpy(&size, data.data(), sizeof(size));
    data.remove_prefix(sizeof(size));
    if (size > data.size()) return std::nullopt;
    data.remove_prefix(size);
    ++count;
  }
  return count;
}

int64_t check_request(const std::string& model, const Facts& facts, Request& request) {
  // Texts are made where they are needed: most requests are right.
  const auto of_model = [&] { return cat("model '", model, "'"); };
  if (request.prompt) {
    if (!facts.has_words)
      refuse(Status::Unsupported, of_model(),
             " does not go on with texts; it takes infer requests");
    constexpr int64_t kMostTokens = 1 << 20;
    if (request.prompt->tokens < 1 || request.prompt->tokens > kMostTokens ||
        request.prompt->temperature < 0 || request.prompt->top_k < 0 ||
        !(request.prompt->top_p > 0 && request.prompt->top_p <= 1))
      refuse(Status::Invalid, of_model(),
             ": wanted max_tokens of 1 to 1048576, temperature and top_k of "
             "at least 0, top_p above 0 and at most 1");
    return 0;
  }
  for (const auto& [count, what] :
       {std::pair(request.inputs.size(), " inputs"), std::pair(request.outputs.size(), " outputs")})
    if (count > kMaxTensors)
      refuse(Status::Invalid, of_model(), ": wanted at most ", kMaxTensors, what, ", got ", count);
  std::vector<Tensor> ordered;
  int64_t rows = 0;
  std::map<std::string, std::pair<int64_t, std::string>> named;  // sizes, and of which input
  for (const auto& input : request.inputs) {
    if (!std::ranges::count(facts.inputs, input.name, &Port::name))
      refuse(Status::Invalid, of_model(), " takes no input '", input.name, "'; it takes ",
             join(names_of(facts.inputs), ", "));
    const auto times = std::ranges::count(request.inputs, input.name, &Tensor::name);
    if (times > 1)
      refuse(Status::Invalid, of_model(), ", input '", input.name, "': wanted it once, got it ",
             times, " times");
  }
  const auto& sequence = request.parameters.sequence;
  if (sequence.size() > 200 || sequence.find('\0') != sequence.npos)
    refuse(Status::Invalid, of_model(),
           ": wanted a sequence_id of at most 200 bytes, none of them ", "zero, got ",
           sequence.size());
  for (const auto& port : facts.inputs) {
    const auto who = [&] { return cat("model '", model, "', input '", port.name, "'"); };
    const auto found = std::ranges::find(request.inputs, port.name, &Tensor::name);
    if (found == request.inputs.end())
      refuse(Status::Invalid, who(), " is missing; it takes ", join(names_of(facts.inputs), ", "));
    if (found->shape.size() > kMaxRank)
      refuse(Status::Invalid, who(), " has ", found->shape.size(), " dimensions, of at most ",
             kMaxRank);
    check_bytes(who, *found);
    if (facts.declared) {
      if (!port.holds(found->type, found->shape))
        refuse(Status::Invalid, who(), ": wanted ", port.wanted(), ", got ",
               plan::to_text(found->type, found->shape));
      if (facts.batch > 0) {
        if (found->shape[0] < 1)
          refuse(Status::Invalid, who(), ": wanted at least one row, got ",
                 plan::to_text(found->type, found->shape));
        if (rows != 0 && found->shape[0] != rows)
          refuse(Status::Invalid, who(), ": wanted ", rows, " rows as the inputs before, got ",
                 plan::to_text(found->type, found->shape));
        rows = found->shape[0];
        if (rows > facts.batch)
          refuse(Status::Invalid, who(), ": wanted at most ", facts.batch, " rows, got ",
                 plan::to_text(found->type, found->shape),
                 facts.pure ? ""
                            : "; its rows are not independent of each other, so that they come one "
                              "by one, or whole where its inputs are not declared");
      }
      for (size_t i = 0; i < port.shape.size(); ++i) {
        if (port.shape[i].name.empty()) continue;
        const auto& [size, where] =
            named.try_emplace(port.shape[i].name, found->shape[i], port.name).first->second;
        if (found->shape[i] != size)
          refuse(Status::Invalid, who(), ": wanted ", port.shape[i].name, " = ", size,
                 " as in input '", where, "', got ", plan::to_text(found->type, found->shape));
      }
    }
    ordered.push_back(std::move(*found));
  }
  for (const auto& output : request.outputs)
    if (!facts.outputs.empty() && !std::ranges::count(facts.outputs, output.name, &Port::name))
      refuse(Status::Invalid, of_model(), " gives no output '", output.name, "'; it gives ",
             join(names_of(facts.outputs), ", "));
  if (facts.stateful && request.parameters.sequence.empty())
    refuse(Status::Invalid, of_model(),
           " keeps state: wanted the parameter sequence_id, the same for all requests of one "
           "sequence");
  request.inputs = std::move(ordered);
  return rows;
}

}  // namespace yoke::serve
