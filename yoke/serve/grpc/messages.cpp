// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/grpc/messages.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/serve/keys.h"

namespace yoke::serve {
namespace {

using inference::InferParameter;
using ParameterMap = google::protobuf::Map<std::string, InferParameter>;
using Input = InferMessage::InferInputTensor;
namespace pb_util = google::protobuf::util;

constexpr const char* kTextInput = "text_input";
constexpr const char* kTextOutput = "text_output";
constexpr size_t kMaxStatusText = 2048;  // gRPC's clients take 8 KiB of headers, and %-encoded

// Sets `value` where the parameter is there; refuses it where it is of another kind.
template <typename T>
void take(const ParameterMap& parameters, const char* name, T& value) {
  const auto found = parameters.find(name);
  if (found == parameters.end()) return;
  const InferParameter& got = found->second;
  const char* wanted = nullptr;
  if constexpr (std::is_same_v<T, bool>) {
    wanted = "bool_param";
    if (got.has_bool_param()) return void(value = got.bool_param());
  } else if constexpr (std::is_same_v<T, std::string>) {
    wanted = "string_param";
    if (got.has_string_param()) return void(value = got.string_param());
  } else if constexpr (std::is_same_v<T, double>) {
    wanted = "double_param, int64_param or uint64_param";
    if (got.has_double_param()) return void(value = got.double_param());
    if (got.has_int64_param()) return void(value = double(got.int64_param()));
    if (got.has_uint64_param()) return void(value = double(got.uint64_param()));
  } else {
    wanted = std::is_signed_v<T> ? "int64_param, or uint64_param below 2^63"
                                 : "uint64_param, or int64_param of at least 0";
    if (got.has_int64_param() && std::in_range<T>(got.int64_param()))
      return void(value = T(got.int64_param()));
    if (got.has_uint64_param() && std::in_range<T>(got.uint64_param()))
      return void(value = T(got.uint64_param()));
  }
  refuse(Status::Invalid, "parameter '", name, "': wanted ", wanted, ", got ",
         got.parameter_choice_case() ? got.ShortDebugString() : std::string("none"));
}

// What Triton's client says to get a last message without data, as a stream of pieces has anyway.
constexpr std::string_view kEmptyFinal = "triton_enable_empty_final_response";

Parameters read_parameters(const ParameterMap& from) {
  for (const auto& [name, value] : from)
    if (name.starts_with("triton_") && name != kEmptyFinal)
      refuse(Status::Invalid,
             "the request's parameters: wanted none that begins with triton_, got '",
             name.substr(0, 64), "'");
  Parameters parameters;
  take(from, "priority", parameters.priority);
  uint64_t timeout_us = 0;
  take(from, "timeout", timeout_us);
  const int64_t most_us = std::numeric_limits<Duration::rep>::max() / 1000 / 2;  // "never"
  if (timeout_us <= uint64_t(most_us)) parameters.timeout = std::chrono::microseconds(timeout_us);
  const auto sequence = from.find("sequence_id");
  if (sequence != from.end() && !sequence->second.has_string_param()) {
    uint64_t number = 0;
    take(from, "sequence_id", number);
    if (number != 0) parameters.sequence = cat(number);
  } else {
    take(from, "sequence_id", parameters.sequence);
  }
  take(from, "sequence_start", parameters.sequence_start);
  take(from, "sequence_end", parameters.sequence_end);
  take(from, "yoke_stream", parameters.stream);
  return parameters;
}

void refuse_unserved(const char* what, const std::string& name, const ParameterMap& parameters) {
  for (const char* key : {"shared_memory_region", "classification"})
    if (parameters.contains(key))
      refuse(Status::Unsupported, what, " '", name, "': ", key,
             " is not served; tensors travel whole, in the message");
}

template <typename Values>
std::string_view view(const Values& values) {
  return {reinterpret_cast<const char*>(values.data()),
          size_t(values.size()) * sizeof(*values.data())};
}

template <typename To, typename Values>
std::string narrow(const Input& input, const Values& values) {
  std::string packed(size_t(values.size()) * sizeof(To), '\0');
  char* at = packed.data();
  for (const auto value : values) {
    if (!std::in_range<To>(value))
      refuse(Status::Invalid, "input '", input.name(), "': ", value, " is no ", input.datatype());
    const To small = To(value);
    std::memcpy(at, &small, sizeof(small));
    at += sizeof(small);
  }
  return packed;
}

void append_bytes(std::string& packed, std::string_view element) {
  const auto size = uint32_t(element.size());
  packed.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(element);
}

const char* field_of(Type type) {
  switch (type) {
    case Type::Bool:
      return "bool_contents";
    case Type::Int8:
    case Type::Int16:
    case Type::Int32:
      return "int_contents";
    case Type::Int64:
      return "int64_contents";
    case Type::Uint8:
    case Type::Uint16:
    case Type::Uint32:
      return "uint_contents";
    case Type::Uint64:
      return "uint64_contents";
    case Type::Fp32:
      return "fp32_contents";
    case Type::Fp64:
      return "fp64_contents";
    case Type::Bytes:
      return "bytes_contents";
    case Type::Fp16:
    case Type::Bf16:
      return "raw_input_contents";
  }
  return "";
}

// Only what must be packed anew is; the rest is seen where it lies.
std::string_view read_contents(const Input& input, Type type, Request& request) {
  const auto& contents = input.contents();
  std::vector<const google::protobuf::FieldDescriptor*> filled;
  contents.GetReflection()->ListFields(contents, &filled);
  for (const auto* field : filled)
    if (field->name() != field_of(type))
      refuse(Status::Invalid, "input '", input.name(), "': wanted ", field_of(type), " for ",
             input.datatype(), ", got ", field->name());
  const auto keep = [&](std::string packed) -> std::string_view {
    const auto kept = std::make_shared<const std::string>(std::move(packed));
    request.holds.push_back(kept);
    return *kept;
  };
  switch (type) {
    case Type::Bool:
      return view(contents.bool_contents());
    case Type::Int8:
      return keep(narrow<int8_t>(input, contents.int_contents()));
    case Type::Int16:
      return keep(narrow<int16_t>(input, contents.int_contents()));
    case Type::Int32:
      return view(contents.int_contents());
    case Type::Int64:
      return view(contents.int64_contents());
    case Type::Uint8:
      return keep(narrow<uint8_t>(input, contents.uint_contents()));
    case Type::Uint16:
      return keep(narrow<uint16_t>(input, contents.uint_contents()));
    case Type::Uint32:
      return view(contents.uint_contents());
    case Type::Uint64:
      return view(contents.uint64_contents());
    case Type::Fp32:
      return view(contents.fp32_contents());
    case Type::Fp64:
      return view(contents.fp64_contents());
    case Type::Fp16:
    case Type::Bf16:
      break;
    case Type::Bytes: {
      std::string packed;
      for (const auto& element : contents.bytes_contents()) append_bytes(packed, element);
      return keep(std::move(packed));
    }
  }
  return {};
}

void read_inputs(const InferMessage& message, Request& request) {
  const int raw = message.raw_input_contents_size();
  if (raw > 0 && raw != message.inputs_size())
    refuse(Status::Invalid, "wanted ", message.inputs_size(),
           " raw_input_contents, one for each input, got ", raw);
  for (int i = 0; i < message.inputs_size(); ++i) {
    const auto& input = message.inputs(i);
    refuse_unserved("input", input.name(), input.parameters());
    const auto type = plan::find_type(input.datatype());
    if (!type)
      refuse(Status::Invalid, "input '", input.name(), "': got the datatype '", input.datatype(),
             "', wanted one as FP32, INT64 or BYTES");
    if (raw > 0 && input.has_contents())
      refuse(Status::Invalid, "input '", input.name(),
             "' has contents though the request has raw_input_contents: wanted one of them");
    request.inputs.push_back(
        {.name = input.name(),
         .type = *type,
         .shape = {input.shape().begin(), input.shape().end()},
         .data = raw > 0 ? message.raw_input_contents(i) : read_contents(input, *type, request)});
  }
}

Prompt read_prompt(const ParameterMap& parameters, const Tensor& input) {
  uint32_t size = 0;
  const bool whole = input.type == Type::Bytes && input.data.size() >= sizeof(size);
  if (whole) std::memcpy(&size, input.data.data(), sizeof(size));
  if (!whole || size != input.data.size() - sizeof(size))
    refuse(Status::Invalid, "input '", kTextInput, "': wanted BYTES[1], one text, got ",
           plan::to_text(input.type, input.shape), " of ", input.data.size(), " bytes");
  Prompt prompt{.text = std::string(input.data.substr(sizeof(size)))};
  take(parameters, "max_tokens", prompt.tokens);
  take(parameters, "temperature", prompt.temperature);
  take(parameters, "top_k", prompt.top_k);
  take(parameters, "top_p", prompt.top_p);
  take(parameters, "seed", prompt.seed);
  return prompt;
}

grpc::StatusCode code_of(Status status) {
  switch (status) {
    case Status::Ok:
      return grpc::StatusCode::OK;
    case Status::Invalid:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case Status::Unauthenticated:
      return grpc::StatusCode::UNAUTHENTICATED;
    case Status::Forbidden:
      return grpc::StatusCode::PERMISSION_DENIED;
    case Status::NotFound:
      return grpc::StatusCode::NOT_FOUND;
    case Status::TooLarge:
    case Status::Exhausted:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case Status::Cancelled:
      return grpc::StatusCode::CANCELLED;
    case Status::Internal:
      return grpc::StatusCode::INTERNAL;
    case Status::Unsupported:
      return grpc::StatusCode::UNIMPLEMENTED;
    case Status::Unavailable:
      return grpc::StatusCode::UNAVAILABLE;
    case Status::Deadline:
      return grpc::StatusCode::DEADLINE_EXCEEDED;
  }
  return grpc::StatusCode::UNKNOWN;
}

}  // namespace

Outcome attempt(const std::function<void()>& act) {
  try {
    act();
    return {};
  } catch (const Refused& refused) {
    return refused.outcome;
  } catch (const std::exception& error) {
    return {Status::Internal, error.what()};
  }
}

grpc::Status to_status(const Outcome& outcome, grpc::CallbackServerContext& context) {
  if (outcome.retry_after > 0)
    context.AddTrailingMetadata("retry-after", cat(int64_t(std::ceil(outcome.retry_after))));
  return {code_of(outcome.status), outcome.text.substr(0, kMaxStatusText)};
}

std::string_view find_metadata(const grpc::CallbackServerContext& context, const char* name) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(name);
  if (found == metadata.end()) return {};
  return {found->second.data(), found->second.size()};
}

Caller identify(const Service& service, const grpc::CallbackServerContext& context,
                bool must_be_tenant) {
  std::string_view key = find_metadata(context, kKeyHeader);
  if (key.empty()) key = bearer_key(find_metadata(context, "authorization"));
  return service.identify(key, find_metadata(context, kTenantHeader), must_be_tenant);
}

void log_refused(Service& service, const grpc::CallbackServerContext& context,
                 const Outcome& outcome, const InferMessage& message) {
  RefusedRequest request{.model = message.model_name(),
                         .id = message.id(),
                         .traceparent = std::string(find_metadata(context, "traceparent"))};
  attempt([&] { request.tenant = identify(service, context).name; });
  service.log_refused(outcome, request, "grpc");
}

Request to_request(const std::shared_ptr<const InferMessage>& message, const Service& service,
                   const grpc::CallbackServerContext& context) {
  Request request{.model = message->model_name(),
                  .version = message->model_version(),
                  .id = message->id(),
                  .binary_output = true,
                  .parameters = read_parameters(message->parameters()),
                  .traceparent = std::string(find_metadata(context, "traceparent")),
                  .holds = {message},
                  .held_bytes = message->ByteSizeLong()};
  read_inputs(*message, request);
  for (const auto& output : message->outputs()) {
    refuse_unserved("output", output.name(), output.parameters());
    if (!std::ranges::count(request.outputs, output.name(), &WantedOutput::name))
      request.outputs.push_back({.name = output.name(), .binary = true});
  }
  if (request.inputs.size() == 1 && request.inputs[0].name == kTextInput) {
    const auto facts = service.facts(request.model, request.version);
    if (facts && facts->has_words) {
      request.prompt = read_prompt(message->parameters(), request.inputs[0]);
      request.inputs.clear();
      request.outputs.clear();
    }
  }
  if (context.deadline() != std::chrono::system_clock::time_point::max()) {
    const auto left =
        std::max<Duration>(context.deadline() - std::chrono::system_clock::now(), Duration(1));
    auto& timeout = request.parameters.timeout;
    timeout = timeout > Duration::zero() ? std::min(timeout, left) : left;
  }
  return request;
}

bool wants_pieces(const InferMessage& message) {
  bool pieces = false;
  take(message.parameters(), "stream", pieces);
  return pieces;
}

void to_message(Answer answer, inference::ModelInferResponse& message) {
  message.set_model_name(std::move(answer.model));
  message.set_model_version(std::move(answer.version));
  message.set_id(std::move(answer.id));
  for (auto& output : answer.outputs) {
    auto& to = *message.add_outputs();
    to.set_name(std::move(output.name));
    to.set_datatype(plan::type_name(output.type));
    to.mutable_shape()->Add(output.shape.begin(), output.shape.end());
    const auto owner = std::ranges::find_if(answer.holds, [&](const std::string& hold) {
      return hold.data() == output.data.data() && hold.size() == output.data.size();
    });
    if (owner != answer.holds.end())
      message.add_raw_output_contents(std::move(*owner));
    else
      message.add_raw_output_contents(output.data.data(), output.data.size());
  }
}

void add_text(std::string_view text, inference::ModelInferResponse& message) {
  auto& output = *message.add_outputs();
  output.set_name(kTextOutput);
  output.set_datatype(plan::type_name(Type::Bytes));
  output.add_shape(1);
  append_bytes(*message.add_raw_output_contents(), text);
}

void from_json(const std::string& json, google::protobuf::Message& message) {
  pb_util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto status = pb_util::JsonStringToMessage(json, &message, options);
  YOKE_CHECK(status.ok(), status.ToString(), " in ", json);
}

std::string to_json(
    const google::protobuf::Map<std::string, inference::ModelRepositoryParameter>& parameters) {
  google::protobuf::Struct object;
  for (const auto& [name, value] : parameters) {
    auto& to = (*object.mutable_fields())[name];
    if (value.has_bytes_param())
      refuse(Status::Unsupported, "parameter '", name,
             "': models are loaded from the server's folders, not from a request");
    if (value.has_bool_param()) to.set_bool_value(value.bool_param());
    if (value.has_int64_param()) to.set_number_value(double(value.int64_param()));
    if (value.has_string_param()) to.set_string_value(value.string_param());
  }
  std::string json;
  const auto status = pb_util::MessageToJsonString(object, &json);
  YOKE_CHECK(status.ok(), status.ToString());
  return json;
}

}  // namespace yoke::serve
