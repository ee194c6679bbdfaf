// SPDX-License-Identifier: Apache-2.0
// The load of load.h over gRPC: ModelInfer in closed and open loops, and ModelStreamInfer, whose
// answers come in the order of the questions. Bodies are messages, as grpc_question() makes them.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/serve/load.h"

namespace yoke::serve {

struct Question;

bool has_grpc_load();  // else all of these throw Kind::Usage
std::string grpc_question(const Question& question);
bool grpc_values(std::string_view answer, std::span<float> values);

// As run_load, but nobody leaves, and make and check are called one by one. A status is 200, 1000
// and gRPC's code, or kLate; headers become metadata.
std::vector<LoadReport> run_grpc_load(const LoadOptions& options,
                                      const std::vector<LoadUser>& users);

// An answer of a stream: the id of its question, and an error or the values of the first output.
using OnStreamAnswer = std::function<void(const std::string& id, const std::string& error,
                                          std::span<const float> values)>;
// Sends `count` questions in one stream, at most `most` of them without an answer. Returns how many
// answers came, within the patience for all of them.
uint64_t run_grpc_stream(const net::Address& to, uint64_t count, uint64_t most, Duration patience,
                         const std::function<void(uint64_t number, Question& question)>& make,
                         const OnStreamAnswer& on_answer);

}  // namespace yoke::serve
