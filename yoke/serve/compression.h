// SPDX-License-Identifier: Apache-2.0
// Bodies as gzip and as deflate, which HTTP says with zlib's own header.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace yoke::serve {

// Either of the two; a checksum that is wrong and bytes that follow are refused as Status::Invalid,
// more than `most` bytes as TooLarge before they are there.
std::string inflate(std::string_view packed, size_t most);
std::string deflate(std::string_view plain, bool gzip);

}  // namespace yoke::serve
