// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "yoke/base/error.h"
#include "yoke/data/normalize.h"

namespace yoke::data {

std::string normalize(Form, std::string text) {
  if (std::ranges::any_of(text, [](char c) { return uint8_t(c) >= 0x80; }))
    fail(
        Kind::Usage,
        "this yoke was built without libunistring, which this tokenizer wants for text that is not "
        "ASCII: install libunistring-dev and build again");
  return text;
}

}  // namespace yoke::data
