// SPDX-License-Identifier: Apache-2.0
// What is UTF-8 and what is not.
#pragma once

#include <string>
#include <string_view>

namespace yoke::data {

// The bytes of the character that the text, not empty, begins with. Negative: there is none, and so
// many bytes stand for one U+FFFD (as in Python, Rust and browsers).
int character_bytes(std::string_view text);
// The text; with U+FFFD, in `storage`, for what is no UTF-8.
std::string_view valid_utf8(std::string_view text, std::string& storage);

}  // namespace yoke::data
