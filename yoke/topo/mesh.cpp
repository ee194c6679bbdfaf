// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/mesh.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::topo {
namespace {

constexpr int kInferred = -1;

std::string text_of(const std::vector<Axis>& axes) {
  std::vector<std::string> parts;
  for (const auto& axis : axes) parts.push_back(cat(axis.name, "=", axis.size));
  return join(parts, " x ");
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == text.npos) return "";
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// The product of the sizes that are given; saturates instead of overflowing.
int64_t product(const std::vector<Axis>& axes) {
  int64_t result = 1;
  for (const auto& axis : axes)
    if (axis.size != kInferred && __builtin_mul_overflow(result, int64_t{axis.size}, &result))
      return std::numeric_limits<int64_t>::max();
  return result;
}

void check_axes(const std::vector<Axis>& axes) {
  const std::string text = text_of(axes);
  if (axes.empty()) fail(Kind::Usage, "a mesh needs at least one axis, as in dp=4");
  for (const auto& axis : axes) {
    if (axis.name.empty()) fail(Kind::Usage, "mesh ", text, ": an axis has no name");
    if (std::ranges::count(axes, axis.name, &Axis::name) > 1)
      fail(Kind::Usage, "mesh ", text, ": axis ", axis.name,
           " is given twice; name each axis once");
    if (axis.size < 1 && axis.size != kInferred)
      fail(Kind::Usage, "mesh ", text, ": got ", axis.name, "=", axis.size,
           ", wanted at least 1, or -1 for whatever is left");
  }
  if (std::ranges::count(axes, kInferred, &Axis::size) > 1)
    fail(Kind::Usage, "mesh ", text, ": only one axis can be -1; give the others their sizes");
}

// Puts the number in place of -1.
void infer(std::vector<Axis>& axes, int num_ranks) {
  const auto open = std::ranges::find(axes, kInferred, &Axis::size);
  if (open == axes.end()) return;
  const int64_t given = product(axes);
  if (num_ranks % given != 0)
    fail(Kind::Usage, "mesh ", text_of(axes), ": the other axes multiply to ", given, ", but ",
         num_ranks, " ranks divided by ", given, " leave ", num_ranks % given,
         " over; change them, or start ", given * (num_ranks / given + 1), " ranks");
  open->size = int(num_ranks / given);
}

}  // namespace

Mesh::Mesh(std::vector<Axis> axes, int num_ranks) : axes_(std::move(axes)), num_ranks_(num_ranks) {
  if (num_ranks < 1) fail(Kind::Usage, "a mesh needs at least 1 rank, got ", num_ranks);
  check_axes(axes_);
  infer(axes_, num_ranks);
  if (const int64_t total = product(axes_); total != num_ranks)
    fail(Kind::Usage, text(), " = ", total, ", but there are ", num_ranks,
         " ranks: change a degree so that they multiply to ", num_ranks, ", or start ", total,
         " ranks");
}

Mesh Mesh::parse(std::string_view text, int num_ranks) {
  std::vector<Axis> axes;
  size_t start = 0;
  while (start <= text.size()) {
    // " x " with spaces, so that an axis may have an x in its name.
    const size_t end = std::min(text.find(" x ", start), text.size());
    const auto part = trimmed(text.substr(start, end - start));
    const size_t equals = part.find('=');
    const auto size =
        equals == part.npos ? std::nullopt : parse_int(trimmed(part.substr(equals + 1)));
    if (!size || !std::in_range<int>(*size))
      fail(Kind::Usage, "mesh '", text, "': got '", part,
           "', wanted axis=degree; write it as pp=2 x dp=2 x tp=2");
    axes.push_back({std::string(trimmed(part.substr(0, equals))), int(*size)});
    start = end + 3;
  }
  return Mesh(std::move(axes), num_ranks);
}

size_t Mesh::position(std::string_view axis) const {
  const auto found = std::ranges::find(axes_, axis, &Axis::name);
  if (found != axes_.end()) return size_t(found - axes_.begin());
  std::vector<std::string> names;
  for (const auto& known : axes_) names.push_back(known.name);
  const auto near = nearest(axis, names);
  fail(Kind::Usage, "mesh ", text(), " has no axis '", axis, "'",
       near.empty() ? "" : cat(" (did you mean ", join(near, " or "), "?)"), "; it has ",
       join(names, ", "));
}

int Mesh::size(std::string_view axis) const { return axes_[position(axis)].size; }

std::vector<int> Mesh::coordinates(int rank) const {
  YOKE_CHECK(rank >= 0 && rank < num_ranks_, "rank ", rank, " of mesh ", text());
  std::vector<int> result(axes_.size());
  for (size_t i = axes_.size(); i-- > 0; rank /= axes_[i].size) result[i] = rank % axes_[i].size;
  return result;
}

int Mesh::coordinate(int rank, std::string_view axis) const {
  return coordinates(rank)[position(axis)];
}

int Mesh::rank_at(std::span<const int> coordinates) const {
  YOKE_CHECK(coordinates.size() == axes_.size(), coordinates.size(), " coordinates in mesh ",
             text());
  int rank = 0;
  for (size_t i = 0; i < axes_.size(); ++i) {
    YOKE_CHECK(coordinates[i] >= 0 && coordinates[i] < axes_[i].size, axes_[i].name, "=",
               coordinates[i], " in mesh ", text());
    rank = rank * axes_[i].size + coordinates[i];
  }
  return rank;
}

std::vector<int> Mesh::group(int rank, std::initializer_list<std::string_view> axes) const {
  std::vector<bool> varies(axes_.size());
  for (const auto axis : axes) varies[position(axis)] = true;
  const auto mine = coordinates(rank);
  std::vector<int> ranks{0};
  for (size_t i = 0; i < axes_.size(); ++i) {
    std::vector<int> longer;
    for (const int prefix : ranks)
      for (int c = varies[i] ? 0 : mine[i]; c <= (varies[i] ? axes_[i].size - 1 : mine[i]); ++c)
        longer.push_back(prefix * axes_[i].size + c);
    ranks = std::move(longer);
  }
  return ranks;
}

std::string Mesh::text() const { return text_of(axes_); }

}  // namespace yoke::topo
