// SPDX-License-Identifier: Apache-2.0
// Unicode's normal forms.
#pragma once

#include <string>

namespace yoke::data {

enum class Form { Nfc, Nfd, Nfkc, Nfkd };

// The text, which must be UTF-8, in that form. Throws Kind::Usage where it is not ASCII and this
// program was built without libunistring.
std::string normalize(Form form, std::string text);

}  // namespace yoke::data
