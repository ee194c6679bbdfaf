// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers (Philox 4x32-10; Salmon et al., SC 2011). A stream is named by
// (seed, step, name); element i of it is computed from i alone in O(1), so every rank of every plan
// draws the same value for the same global element, in any order and from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace yoke {

// One block: 128 random bits for a 128-bit counter under a 64-bit key.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class Rng {
 public:
  Rng(uint64_t seed, std::string_view name, uint64_t step = 0);

  uint32_t bits(uint64_t index) const;
  float uniform(uint64_t index) const;                   // in [0, 1), 24 bits
  double normal(uint64_t index) const;                   // mean 0, variance 1 (Box-Muller)
  uint64_t below(uint64_t index, uint64_t bound) const;  // in [0, bound); bias under bound / 2^64

 private:
  std::array<uint32_t, 4> block(uint64_t index) const;
  uint64_t seed_;
  uint64_t stream_;  // hash of name and step
};

}  // namespace yoke
