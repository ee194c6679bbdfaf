// SPDX-License-Identifier: Apache-2.0
// Which sample comes at a position of an endless row of epochs. Shuffled, an epoch is a permutation
// that is computed from the position alone: a Feistel network over the next power of 4, walked
// until it is back inside (Black and Rogaway, 2002). Values: every rank makes an equal one.
#pragma once

#include <cstdint>

namespace yoke::data {

class Sampler {
 public:
  Sampler(int64_t size, bool shuffle, uint64_t seed);
  int64_t at(int64_t position) const;

 private:
  int64_t size_;
  bool shuffle_;
  uint64_t seed_;
  int half_bits_ = 1;
};

}  // namespace yoke::data
