// SPDX-License-Identifier: Apache-2.0
// Rectangular parts of a tensor, as checkpoints keep them: whoever wants a part takes what it has
// in common with the parts that were saved, whatever plan cut them. Values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace yoke::plan {

struct Box {
  std::vector<int64_t> offset = {}, shape = {};  // one number for each dim
  int64_t count() const;
  bool operator==(const Box&) const = default;
};
Box whole_box(const std::vector<int64_t>& shape);
std::string to_text(const Box& box);  // "[0:4, 2:8]"

// Empty boxes are none.
std::optional<Box> intersect(const Box& a, const Box& b);

// Elements [first, first + count) of a tensor in row-major order, as boxes that follow each other:
// at most 2n - 1 for n dims.
std::vector<Box> boxes_of_range(const std::vector<int64_t>& shape, int64_t first, int64_t count);

// How ranks cut a dim: every one has its equal part of each of the parts, one after the other.
struct Cut {
  int64_t dim = 0;
  std::vector<int64_t> parts = {};  // add up to the size of the dim
  int rank = 0, ranks = 1;
};
// A box of what the rank has, as boxes of the whole tensor, with the box of each in the first's own
// coordinates.
struct Placed {
  Box whole = {}, local = {};
};
std::vector<Placed> place(const Box& local, const Cut& cut);

// Whether the boxes have every element of the tensor exactly once; else why not.
std::optional<std::string> find_gap(const std::vector<int64_t>& shape,
                                    const std::vector<Box>& boxes);

}  // namespace yoke::plan
