// SPDX-License-Identifier: Apache-2.0
// Whether a request fits a model: names, datatypes, every size, and that there are as many bytes as
// its shapes say. Nothing that fails here reaches a worker.
#pragma once

#include "yoke/serve/facts.h"
#include "yoke/serve/request.h"

namespace yoke::serve {

// Puts the inputs into the model's order and returns the rows, 0 where it has none. Throws Refused.
int64_t check_request(const std::string& model, const Facts& facts, Request& request);
// Elements of Type::Bytes, each with its length before it; nothing where they are malformed.
std::optional<int64_t> count_bytes_elements(std::string_view data);

}  // namespace yoke::serve
