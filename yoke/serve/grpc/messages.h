// SPDX-License-Identifier: Apache-2.0
// gRPC's messages and metadata as the Service has them: requests, callers, outcomes, and back.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string_view>

#include "inference.pb.h"
#include "yoke/serve/service.h"

namespace yoke::serve {

using InferMessage = inference::ModelInferRequest;

// What `act` threw, if it did.
Outcome attempt(const std::function<void()>& act);
// Adds to what the client gets after the status; so only for the status that ends the call.
grpc::Status to_status(const Outcome& outcome, grpc::CallbackServerContext& context);

std::string_view find_metadata(const grpc::CallbackServerContext& context, const char* name);
Caller identify(const Service& service, const grpc::CallbackServerContext& context,
                bool must_be_tenant = true);

// A line in the access log, with the tenant where it is known.
void log_refused(Service& service, const grpc::CallbackServerContext& context,
                 const Outcome& outcome, const InferMessage& message);

// The request points into the message and holds it. With the input "text_input", to a model of
// words, it is a prompt. Throws Refused.
Request to_request(const std::shared_ptr<const InferMessage>& message, const Service& service,
                   const grpc::CallbackServerContext& context);
// Whether a prompt is to be answered piece by piece.
bool wants_pieces(const InferMessage& message);

// Moves the outputs' bytes where it can.
void to_message(Answer answer, inference::ModelInferResponse& message);
void add_text(std::string_view text, inference::ModelInferResponse& message);

// Descriptions; fields that the message does not have are left out.
void from_json(const std::string& json, google::protobuf::Message& message);
std::string to_json(
    const google::protobuf::Map<std::string, inference::ModelRepositoryParameter>& parameters);

}  // namespace yoke::serve
