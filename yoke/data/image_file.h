// SPDX-License-Identifier: Apache-2.0
// Pictures in files. Threads: all.
#pragma once

#include <filesystem>

#include "yoke/data/image.h"

namespace yoke::data {

// A PNG (of any depth; grey and palettes become colours, alpha is dropped, gamma left as it is) or
// a JPEG (grey or colours, not CMYK), told by its first bytes. Throws Kind::Io with the file's name
// and what is wrong: cut off, damaged, of another kind, of more than kMaxPixels.
Image read_image(const std::filesystem::path& path);

}  // namespace yoke::data
