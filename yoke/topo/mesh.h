// SPDX-License-Identifier: Apache-2.0
// The ranks of a run as a grid of named axes, `pp=2 x dp=2 x tp=2`. Row-major: ranks that differ in
// the last axis only are neighbours, so put the axis that talks most last. A value; every rank
// builds an equal one.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::topo {

struct Axis {
  std::string name = {};
  int size = 1;
  bool operator==(const Axis&) const = default;
};

class Mesh {
 public:
  // The sizes must multiply to num_ranks; one of them may be -1, "whatever is left". Throws
  // Kind::Usage with the numbers.
  Mesh(std::vector<Axis> axes, int num_ranks);
  // From the text form.
  static Mesh parse(std::string_view text, int num_ranks);

  int num_ranks() const { return num_ranks_; }
  const std::vector<Axis>& axes() const { return axes_; }
  int size(std::string_view axis) const;

  std::vector<int> coordinates(int rank) const;  // one for each axis
  int coordinate(int rank, std::string_view axis) const;
  int rank_at(std::span<const int> coordinates) const;

  // The ranks, ascending, that share with `rank` every coordinate but those of `axes`: with one
  // axis, the line through `rank` along it. The first of them names the group (a split's color).
  std::vector<int> group(int rank, std::initializer_list<std::string_view> axes) const;
  std::vector<int> group(int rank, std::string_view axis) const { return group(rank, {axis}); }

  std::string text() const;  // "pp=2 x dp=2 x tp=2"
  bool operator==(const Mesh&) const = default;

 private:
  size_t position(std::string_view axis) const;  // throws Kind::Usage with the nearest names
  std::vector<Axis> axes_;
  int num_ranks_;
};

}  // namespace yoke::topo
