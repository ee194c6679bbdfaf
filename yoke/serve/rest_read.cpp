// SPDX-License-Identifier: Apache-2.0
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "yoke/serve/channel.h"
#include "yoke/serve/rest_body.h"

namespace yoke::serve {
namespace {

namespace dom = simdjson::dom;

constexpr size_t kShownBytes = 64;                         // of a text that was got
constexpr size_t kKeptBytes = 16 << 20;                    // of JSON that a reader keeps memory for
constexpr uint64_t kLongestTimeoutUs = 1'000'000'000'000;  // 11 days; clocks would overflow

// Where in a request something stands; a text of it is made only when it is refused.
struct Where {
  std::string_view part, name = {}, key = {};
  friend std::ostream& operator<<(std::ostream& out, const Where& where) {
    out << where.part;
    if (!where.name.empty()) out << " '" << where.name << "'";
    if (!where.key.empty()) out << ", \"" << where.key << '"';
    return out;
  }
};

std::string shown(const dom::element& got) {
  if (got.is_array()) return "an array";
  if (got.is_object()) return "an object";
  if (!got.is_string()) return simdjson::minify(got);
  const auto text = got.get_string().value_unsafe();
  return cat("\"", text.substr(0, kShownBytes), text.size() > kShownBytes ? "…\"" : "\"");
}

template <typename T>
constexpr const char* kKind = nullptr;
template <>
constexpr const char* kKind<bool> = "true or false";
template <>
constexpr const char* kKind<int64_t> = "a whole number of 64 bits";
template <>
constexpr const char* kKind<uint64_t> = "a whole number of 64 bits, not negative";
template <>
constexpr const char* kKind<double> = "a number";
template <>
constexpr const char* kKind<std::string_view> = "a string";
template <>
constexpr const char* kKind<dom::array> = "an array";
template <>
constexpr const char* kKind<dom::object> = "an object";

template <typename T>
T as(const dom::element& got, const Where& where) {
  T value{};
  if (got.get(value) != simdjson::SUCCESS)
    refuse(Status::Invalid, where, ": wanted ", kKind<T>, ", got ", shown(got));
  return value;
}

// Of keys that come twice the first counts.
template <typename T>
std::optional<T> find(const dom::object& object, std::string_view key, Where where) {
  dom::element found;
  if (object.at_key(key).get(found) != simdjson::SUCCESS) return std::nullopt;
  where.key = key;
  return as<T>(found, where);
}

template <typename T>
T need(const dom::object& object, std::string_view key, Where where) {
  const auto found = find<T>(object, key, where);
  where.key = key;
  if (!found) refuse(Status::Invalid, where, ": wanted ", kKind<T>, ", got nothing");
  return *found;
}

// A name or id; empty where there is none.
std::string find_name(const dom::object& object, std::string_view key, const Where& where) {
  const auto text = find<std::string_view>(object, key, where).value_or(std::string_view());
  if (text.size() > kMaxNameBytes)
    refuse(Status::Invalid, where, ", \"", key, "\": wanted at most ", kMaxNameBytes,
           " bytes, got ", text.size());
  return std::string(text);
}

std::string need_name(const dom::object& tensor, const char* part) {
  auto name = find_name(tensor, "name", {part});
  if (name.empty()) refuse(Status::Invalid, part, ", \"name\": wanted a name, got none");
  return name;
}

dom::array need_tensors(const dom::object& root, const char* key) {
  const auto tensors = need<dom::array>(root, key, {"the request"});
  if (tensors.size() > kMaxTensors)
    refuse(Status::Invalid, "the request, \"", key, "\": wanted at most ", kMaxTensors, ", got ",
           tensors.size());
  return tensors;
}

dom::object parse(dom::parser& parser, std::string_view json, size_t room) {
  if (json.size() > kMaxJsonBytes)
    refuse(Status::TooLarge, "the request: wanted at most ", kMaxJsonBytes, " bytes of JSON, got ",
           json.size(), "; send the tensors as binary");
  if (json.starts_with("\xef\xbb\xbf")) json.remove_prefix(3);  // a byte order mark
  if (json.size() > kKeptBytes || parser.capacity() > kKeptBytes) parser = dom::parser();
  dom::element root;
  const auto error =
      parser.parse(json.data(), json.size(), room < simdjson::SIMDJSON_PADDING).get(root);
  if (error != simdjson::SUCCESS) {
    const bool unsayable = json.find("NaN") != json.npos || json.find("Infinity") != json.npos;
    refuse(Status::Invalid,
           "the request: wanted JSON, got what cannot be read: ", simdjson::error_message(error),
           unsayable ? " (JSON has no NaN or Infinity: send the tensor as binary)" : "");
  }
  return as<dom::object>(root, {"the request"});
}

Shape read_shape(const dom::array& sizes, const Where& where) {
  Shape shape;
  for (const auto size : sizes) {
    const auto value = as<uint64_t>(size, where);
    if (shape.size() == kMaxRank || value > INT64_MAX)
      refuse(Status::Invalid, where, ": wanted at most ", kMaxRank, " sizes of 63 bits, got ",
             shape.size() == kMaxRank ? sizes.size() : value);
    shape.push_back(int64_t(value));
  }
  return shape;
}

// However deep they are nested, in the order in which they stand. The parser bounds the depth.
template <typename Take>
void each_element(const dom::array& data, const Take& take) {
  for (const auto element : data)
    if (element.is_array())
      each_element(element.get_array().value_unsafe(), take);
    else
      take(element);
}

// Whether it is one of these, and fits.
template <typename T>
bool read_element(const dom::element& from, T& to) {
  using Wide = std::conditional_t<
      std::is_same_v<T, bool>, bool,
      std::conditional_t<std::is_floating_point_v<T>, double,
                         std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>>;
  Wide value{};
  if (from.get(value) != simdjson::SUCCESS) return false;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
    if (!std::in_range<T>(value)) return false;
  to = T(value);
  if constexpr (std::is_floating_point_v<T>) return std::isfinite(to);
  return true;
}

template <typename T>
int64_t pack_numbers(const dom::array& data, Type type, size_t room, const Where& where,
                     std::string& out) {
  out.resize(room * sizeof(T));
  size_t got = 0;
  each_element(data, [&](const dom::element& element) {
    T value{};
    if (!read_element(element, value))
      refuse(Status::Invalid, where, ": wanted elements of ", plan::type_name(type), ", got ",
             shown(element), " as element ", got);
    if (got < room) std::memcpy(out.data() + got * sizeof(T), &value, sizeof(T));
    ++got;
  });
  return int64_t(got);
}

int64_t pack_strings(const dom::array& data, Type, size_t, const Where& where, std::string& out) {
  int64_t got = 0;
  each_element(data, [&](const dom::element& element) {
    const auto text = as<std::string_view>(element, where);
    const auto size = uint32_t(text.size());
    out.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text);
    ++got;
  });
  return got;
}

// `room` elements at most are packed, all are counted. The halves have no JSON.
using Pack = int64_t(const dom::array&, Type, size_t room, const Where&, std::string& out);
constexpr std::array<Pack*, 14> kPack{pack_numbers<bool>,
                                      pack_numbers<uint8_t>,
                                      pack_numbers<uint16_t>,
                                      pack_numbers<uint32_t>,
                                      pack_numbers<uint64_t>,
                                      pack_numbers<int8_t>,
                                      pack_numbers<int16_t>,
                                      pack_numbers<int32_t>,
                                      pack_numbers<int64_t>,
                                      nullptr,
                                      pack_numbers<float>,
                                      pack_numbers<double>,
                                      nullptr,
                                      pack_strings};  // as Type's

// `rest` is what follows the JSON; a binary tensor takes its part of it.
Tensor read_input(const dom::object& input, std::string_view& rest, Request& request) {
  Tensor tensor{.name = need_name(input, "an input")};
  const Where where{"input", tensor.name};
  const auto datatype = need<std::string_view>(input, "datatype", where);
  const auto type = plan::find_type(datatype);
  if (!type)
    refuse(Status::Invalid, where, ": wanted a datatype as FP32, INT64 or BYTES, got '",
           datatype.substr(0, kShownBytes), "'");
  tensor.type = *type;
  tensor.shape =
      read_shape(need<dom::array>(input, "shape", where), {"input", tensor.name, "shape"});
  const auto count = plan::num_elements(tensor.shape);
  if (!count)
    refuse(Status::Invalid, where, ": wanted a shape of less than 2^63 elements, got ",
           plan::to_text(tensor.type, tensor.shape));

  std::optional<uint64_t> bytes;
  if (const auto parameters = find<dom::object>(input, "parameters", where)) {
    if (parameters->at_key("shared_memory_region").error() == simdjson::SUCCESS)
      refuse(Status::Unsupported, where, ": shared memory is not supported; send the data");
    bytes = find<uint64_t>(*parameters, "binary_data_size", where);
  }
  const auto data = find<dom::array>(input, "data", where);
  if (data.has_value() == bytes.has_value())
    refuse(Status::Invalid, where, ": wanted either \"data\" or \"binary_data_size\", got ",
           data ? "both" : "neither");
  if (bytes) {
    if (*bytes > rest.size())
      refuse(Status::Invalid, where, ": wanted ", *bytes, " bytes after the JSON, got ",
             rest.size());
    tensor.data = rest.substr(0, *bytes);
    rest.remove_prefix(*bytes);
    return tensor;
  }
  const auto pack = kPack[size_t(tensor.type)];
  if (pack == nullptr)
    refuse(Status::Invalid, where, ": wanted no ", datatype,
           " in JSON, which has none; send the tensor as binary");
  // Each element has a slot of the parser's at least: a shape alone makes no memory.
  const size_t room = std::min(size_t(*count), data->number_of_slots());
  auto packed = std::make_shared<std::string>();
  const auto got = pack(*data, tensor.type, room, {"input", tensor.name, "data"}, *packed);
  if (got != *count)
    refuse(Status::Invalid, where, ": wanted ", *count, " elements for ",
           plan::to_text(tensor.type, tensor.shape), ", got ", got);
  tensor.data = *packed;
  request.holds.push_back(std::move(packed));
  return tensor;
}

void read_output(const dom::object& output, std::vector<WantedOutput>& wanted) {
  WantedOutput result{.name = need_name(output, "an output")};
  const Where where{"output", result.name};
  if (const auto parameters = find<dom::object>(output, "parameters", where)) {
    for (const char* key : {"shared_memory_region", "classification"})
      if (parameters->at_key(key).error() == simdjson::SUCCESS)
        refuse(Status::Unsupported, where, ": \"", key, "\" is not supported; ask for the data");
    result.binary = find<bool>(*parameters, "binary_data", where).value_or(false);
  }
  if (std::ranges::find(wanted, result.name, &WantedOutput::name) == wanted.end())
    wanted.push_back(std::move(result));
}

void read_parameters(const dom::object& all, Request& request) {
  const Where where{"the request's parameters"};
  for (const auto& [key, value] : all) {
    if (key.starts_with("triton_"))
      refuse(Status::Invalid, where, ": wanted none that begins with triton_, got '",
             key.substr(0, kShownBytes), "'");
    if (value.is_array() || value.is_object() || value.is_null())
      refuse(Status::Invalid, where, ", \"", key.substr(0, kShownBytes),
             "\": wanted a string, a number, true or false, got ", shown(value));
  }
  auto& to = request.parameters;
  to.priority = find<uint64_t>(all, "priority", where).value_or(0);
  const auto timeout = find<uint64_t>(all, "timeout", where).value_or(0);
  to.timeout = std::chrono::microseconds(std::min(timeout, kLongestTimeoutUs));
  dom::element sequence;
  if (all.at_key("sequence_id").get(sequence) == simdjson::SUCCESS) {
    uint64_t number = 0;
    if (sequence.get(number) != simdjson::SUCCESS)
      to.sequence = find_name(all, "sequence_id", where);
    else if (number != 0)  // which says that there is none
      to.sequence = std::to_string(number);
  }
  to.sequence_start = find<bool>(all, "sequence_start", where).value_or(false);
  to.sequence_end = find<bool>(all, "sequence_end", where).value_or(false);
  to.stream = find_name(all, "yoke_stream", where);
  request.binary_output = find<bool>(all, "binary_data_output", where).value_or(false);
}

// The sizes of an input that has so many bytes: at most one may vary besides the rows.
Shape deduce_shape(const Port& port, bool has_rows, size_t bytes) {
  Shape shape = port.sizes();
  if (has_rows) shape[0] = 1;
  const auto varies = std::ranges::find(shape, -1);
  if (std::ranges::count(shape, -1) > 1 || (port.type == Type::Bytes && varies != shape.end()))
    refuse(Status::Invalid,
           "a body without JSON wants an input with one size that varies at most, ",
           "or of one string; got ", port.text());
  if (varies == shape.end()) return shape;
  *varies = 1;
  const auto each = uint64_t(plan::num_elements(shape).value_or(0)) * plan::size_of(port.type);
  *varies = each == 0 ? 0 : int64_t(bytes / each);
  return shape;
}

}  // namespace

RestReader::RestReader() : parser_(std::make_unique<dom::parser>()) {}
RestReader::~RestReader() = default;

Request RestReader::read_infer(std::shared_ptr<const std::string> body,
                               std::optional<int64_t> json_bytes) {
  std::string_view rest = *body;
  if (json_bytes && (*json_bytes < 0 || uint64_t(*json_bytes) > rest.size()))
    refuse(Status::Invalid, "Inference-Header-Content-Length: wanted at most the ", rest.size(),
           " bytes of the body, got ", *json_bytes);
  const auto json = rest.substr(0, json_bytes ? size_t(*json_bytes) : rest.size());
  rest.remove_prefix(json.size());
  const auto root = parse(*parser_, json, body->capacity() - json.size());

  id_ = find_name(root, "id", {"the request"});
  Request request{.id = id_};
  if (const auto parameters = find<dom::object>(root, "parameters", {"the request"}))
    read_parameters(*parameters, request);
  for (const auto input : need_tensors(root, "inputs"))
    request.inputs.push_back(read_input(as<dom::object>(input, {"an input"}), rest, request));
  if (!rest.empty())
    refuse(Status::Invalid, "the request: wanted no bytes after the last input's, got ",
           rest.size());
  if (root.at_key("outputs").error() == simdjson::SUCCESS)
    for (const auto output : need_tensors(root, "outputs"))
      read_output(as<dom::object>(output, {"an output"}), request.outputs);
  if (json.size() < body->size()) {
    request.held_bytes = body->size();
    request.holds.push_back(std::move(body));
  }
  return request;
}

Request RestReader::read_raw(std::shared_ptr<const std::string> body, const Facts& facts) {
  if (facts.inputs.size() != 1 || !facts.declared)
    refuse(Status::Invalid, "a body without JSON wants a model of one declared input, got one of ",
           facts.inputs.size(), facts.declared ? "" : ", not declared",
           "; send JSON before the tensors");
  const auto& port = facts.inputs[0];
  Request request{.binary_output = true};
  if (port.type == Type::Bytes) {  // the body is the one string, without its length
    const auto size = uint32_t(body->size());
    if (size != body->size())
      refuse(Status::TooLarge, "a string: wanted at most ", UINT32_MAX, " bytes, got ",
             body->size());
    auto packed = std::make_shared<std::string>(reinterpret_cast<const char*>(&size), sizeof(size));
    packed->append(*body);
    body = std::move(packed);
  }
  request.inputs.push_back(
      {.name = port.name,
       .type = port.type,
       .shape = deduce_shape(port, facts.batch > 0 && port.has_rows(), body->size()),
       .data = *body});
  request.holds.push_back(std::move(body));
  return request;
}

Request RestReader::read_generate(const std::string& body) {
  const auto root = parse(*parser_, body, body.capacity() - body.size());
  const Where where{"the request"};
  id_ = find_name(root, "id", where);
  Request request{.id = id_};
  const auto parameters = find<dom::object>(root, "parameters", where);
  if (parameters) read_parameters(*parameters, request);
  Prompt prompt{.text = std::string(need<std::string_view>(root, "text_input", where))};
  const auto set = [&]<typename T>(const char* key, T& to) {
    auto value = find<T>(root, key, where);
    if (!value && parameters) value = find<T>(*parameters, key, {"the request's parameters"});
    if (value) to = *value;
  };
  bool is_stream = false;  // the path says it; here it is only held to its kind
  set("max_tokens", prompt.tokens);
  set("temperature", prompt.temperature);
  set("top_k", prompt.top_k);
  set("top_p", prompt.top_p);
  set("seed", prompt.seed);
  set("stream", is_stream);
  request.prompt = std::move(prompt);
  return request;
}

bool RestReader::read_index(const std::string& body) {
  if (body.empty()) return false;
  const auto root = parse(*parser_, body, body.capacity() - body.size());
  return find<bool>(root, "ready", {"the request"}).value_or(false);
}

}  // namespace yoke::serve
