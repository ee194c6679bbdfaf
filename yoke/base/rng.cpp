// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/rng.h"

#include <cmath>
#include <numbers>

namespace yoke {
namespace {

uint64_t join(uint32_t high, uint32_t low) { return uint64_t{high} << 32 | low; }

// FNV-1a over the name, then the step, then a full mix (the finaliser of SplitMix64).
uint64_t stream_of(std::string_view name, uint64_t step) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
  hash ^= step * 0x9e3779b97f4a7c15;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

}  // namespace

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * c[2];
    c = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1],
         uint32_t(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

Rng::Rng(uint64_t seed, std::string_view name, uint64_t step)
    : seed_(seed), stream_(stream_of(name, step)) {}

std::array<uint32_t, 4> Rng::block(uint64_t index) const {
  return philox(
      {uint32_t(index), uint32_t(index >> 32), uint32_t(stream_), uint32_t(stream_ >> 32)},
      {uint32_t(seed_), uint32_t(seed_ >> 32)});
}

uint32_t Rng::bits(uint64_t index) const { return block(index / 4)[index % 4]; }

float Rng::uniform(uint64_t index) const { return float(bits(index) >> 8) * 0x1p-24f; }

double Rng::normal(uint64_t index) const {
  // Elements 2k and 2k+1 share a block: its first two words are the radius, the others the angle.
  const auto words = block(index / 2);
  const double radius_sample = (double(join(words[0], words[1]) >> 11) + 1) * 0x1p-53;  // (0, 1]
  const double angle = double(join(words[2], words[3]) >> 11) * 0x1p-53 * 2 * std::numbers::pi;
  const double radius = std::sqrt(-2 * std::log(radius_sample));
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

uint64_t Rng::below(uint64_t index, uint64_t bound) const {
  const auto words = block(index / 2);
  const uint64_t sample = index % 2 == 0 ? join(words[0], words[1]) : join(words[2], words[3]);
  return uint64_t((static_cast<unsigned __int128>(sample) * bound) >> 64);
}

}  // namespace yoke
