// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json of the BPE kind: added tokens are cut out, the text between is normalized, cut
// into words, and these are merged.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "yoke/data/tokenizer.h"

namespace yoke::data {

// `end`: the token that ends a document, by tokenizer_config.json. Errors name `where`.
std::shared_ptr<const Tokenizer> tokenizer_from_json(const nlohmann::json& all,
                                                     const std::string& where,
                                                     const std::optional<std::string>& end);

}  // namespace yoke::data
