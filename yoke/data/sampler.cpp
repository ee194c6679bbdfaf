// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/sampler.h"

#include "yoke/base/error.h"
#include "yoke/base/rng.h"

namespace yoke::data {

Sampler::Sampler(int64_t size, bool shuffle, uint64_t seed)
    : size_(size), shuffle_(shuffle), seed_(seed) {
  YOKE_CHECK(size >= 1);
  while ((int64_t{1} << (2 * half_bits_)) < size_) ++half_bits_;
}

int64_t Sampler::at(int64_t position) const {
  const int64_t epoch = position / size_, place = position % size_;
  if (!shuffle_) return place;
  const Rng rng(seed_, "shuffle", uint64_t(epoch));
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  auto value = uint64_t(place);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = left ^ (rng.bits(round << 32 | right) & mask);
      left = right;
      right = mixed;
    }
    value = left << half_bits_ | right;
  } while (value >= uint64_t(size_));
  return int64_t(value);
}

}  // namespace yoke::data
