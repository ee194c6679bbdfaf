// SPDX-License-Identifier: Apache-2.0
// Keys by which tenants are known. What is stored is their SHA-256 alone.
#pragma once

#include <string>
#include <string_view>

namespace yoke::serve {

std::string new_key();                      // "yk-…", 256 random bits
std::string sha256(std::string_view text);  // 64 digits
// In a time that does not tell how much of it is right.
bool same_digest(std::string_view one, std::string_view other);
// KEY of "Bearer KEY", as Authorization has it; empty where it is something else.
std::string_view bearer_key(std::string_view authorization);

}  // namespace yoke::serve
