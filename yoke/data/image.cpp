// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/image.h"

#include <algorithm>
#include <cmath>

#include "yoke/base/error.h"

namespace yoke::data {
namespace {

constexpr int kBits = 22;  // of a weight behind the point, as Pillow has them
constexpr uint32_t kHalf = 1u << (kBits - 1);

uint8_t rounded(uint32_t sum) { return uint8_t(std::min(sum >> kBits, 255u)); }

// Which of the old pixels of a line make up each new one, and with what weights.
struct Filter {
  struct Window {
    int64_t first, count;
    const uint32_t* weights;
  };
  Filter(int64_t from, int64_t to) {
    const double scale = double(from) / double(to), support = std::max(scale, 1.0);
    const int64_t most = 2 * int64_t(std::ceil(support)) + 1;
    weights.resize(size_t(to * most));
    std::vector<double> exact(static_cast<size_t>(most));
    for (int64_t i = 0; i < to; ++i) {
      const double center = (double(i) + 0.5) * scale;
      const auto first = int64_t(std::max(center - support + 0.5, 0.0));
      const int64_t count = std::min(int64_t(center + support + 0.5), from) - first;
      double sum = 0;
      for (int64_t k = 0; k < count; ++k)
        sum += exact[size_t(k)] =
            std::max(0.0, 1 - std::abs((double(first + k) - center + 0.5) * (1 / support)));
      uint32_t* const of = &weights[size_t(i * most)];
      for (int64_t k = 0; k < count; ++k)
        of[k] = uint32_t(0.5 + exact[size_t(k)] / sum * (1 << kBits));
      windows.push_back({first, count, of});
    }
  }
  std::vector<uint32_t> weights;
  std::vector<Window> windows;
};

Image resize_width(const Image& image, int64_t width) {
  const Filter filter(image.width, width);
  Image out{image.height, width, std::vector<uint8_t>(size_t(image.height * width * 3))};
  uint8_t* to = out.pixels.data();
  for (int64_t y = 0; y < image.height; ++y)
    for (const auto& window : filter.windows) {
      const uint8_t* from = &image.pixels[size_t((y * image.width + window.first) * 3)];
      uint32_t red = kHalf, green = kHalf, blue = kHalf;
      for (int64_t k = 0; k < window.count; ++k, from += 3) {
        red += from[0] * window.weights[k];
        green += from[1] * window.weights[k];
        blue += from[2] * window.weights[k];
      }
      *to++ = rounded(red);
      *to++ = rounded(green);
      *to++ = rounded(blue);
    }
  return out;
}

Image resize_height(const Image& image, int64_t height) {
  const Filter filter(image.height, height);
  const int64_t row = image.width * 3;
  Image out{height, image.width, std::vector<uint8_t>(size_t(height * row))};
  std::vector<uint32_t> sums(static_cast<size_t>(row));
  uint8_t* to = out.pixels.data();
  for (const auto& window : filter.windows) {
    std::ranges::fill(sums, kHalf);
    for (int64_t k = 0; k < window.count; ++k) {
      const uint8_t* from = &image.pixels[size_t((window.first + k) * row)];
      const uint32_t weight = window.weights[k];
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += from[i] * weight;
    }
    to = std::ranges::transform(sums, to, rounded).out;
  }
  return out;
}

}  // namespace

Image resize(const Image& image, int64_t height, int64_t width) {
  YOKE_CHECK(height > 0 && width > 0 && image.height > 0 && image.width > 0);
  if (width == image.width) return height == image.height ? image : resize_height(image, height);
  const Image wide = resize_width(image, width);
  return height == image.height ? wide : resize_height(wide, height);
}

Image crop(const Image& image, int64_t top, int64_t left, int64_t height, int64_t width) {
  YOKE_CHECK(top >= 0 && left >= 0 && height > 0 && width > 0 && top + height <= image.height &&
             left + width <= image.width);
  Image out{height, width, std::vector<uint8_t>(size_t(height * width * 3))};
  for (int64_t y = 0; y < height; ++y)
    std::copy_n(&image.pixels[size_t(((top + y) * image.width + left) * 3)], width * 3,
                &out.pixels[size_t(y * width * 3)]);
  return out;
}

Image flip(const Image& image) {
  Image out = image;
  for (int64_t y = 0; y < image.height; ++y)
    for (int64_t x = 0; x < image.width; ++x)
      std::copy_n(&image.pixels[size_t((y * image.width + x) * 3)], 3,
                  &out.pixels[size_t(((y + 1) * image.width - 1 - x) * 3)]);
  return out;
}

Image shift(const Image& image, int64_t down, int64_t right) {
  const int64_t height = image.height - std::abs(down), width = image.width - std::abs(right);
  Image out{image.height, image.width, std::vector<uint8_t>(image.pixels.size())};
  if (width <= 0) return out;
  for (int64_t y = 0; y < height; ++y) {
    const int64_t from = (y + std::max<int64_t>(-down, 0)) * image.width,
                  to = from + down * image.width;
    std::copy_n(&image.pixels[size_t((from + std::max<int64_t>(-right, 0)) * 3)], width * 3,
                &out.pixels[size_t((to + std::max<int64_t>(right, 0)) * 3)]);
  }
  return out;
}

}  // namespace yoke::data
