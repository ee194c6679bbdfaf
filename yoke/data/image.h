// SPDX-License-Identifier: Apache-2.0
// A picture in memory, and what is done to it before it is a sample.
#pragma once

#include <cstdint>
#include <vector>

namespace yoke::data {

constexpr int64_t kMaxPixels = 100'000'000;  // of a picture; more is taken for a mistake

struct Image {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> pixels = {};  // [height, width, 3], red, green, blue
};

// Bilinear, over all the pixels that a smaller one stands for, as Pillow's resize(BILINEAR): at
// most 1 from its values, and equal where it takes the width first too.
Image resize(const Image& image, int64_t height, int64_t width);
// The part must lie within.
Image crop(const Image& image, int64_t top, int64_t left, int64_t height, int64_t width);
// Left and right change places.
Image flip(const Image& image);
// Moved down and right, or up and left where negative; black comes in.
Image shift(const Image& image, int64_t down, int64_t right);

}  // namespace yoke::data
