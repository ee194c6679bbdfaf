// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/box.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

int64_t product(const std::vector<int64_t>& sizes, size_t from = 0) {
  return std::accumulate(sizes.begin() + long(from), sizes.end(), int64_t{1}, std::multiplies<>());
}

// The range lies in what `prefix` leaves of the tensor.
void add_boxes(const std::vector<int64_t>& shape, std::vector<int64_t> prefix, int64_t first,
               int64_t count, std::vector<Box>& boxes) {
  if (count == 0) return;
  const size_t dim = prefix.size();
  const auto add_rows = [&](int64_t row, int64_t rows) {
    Box box{prefix, std::vector<int64_t>(dim, 1)};
    if (dim < shape.size()) {
      box.offset.push_back(row);
      box.shape.push_back(rows);
    }
    for (size_t d = dim + 1; d < shape.size(); ++d) {
      box.offset.push_back(0);
      box.shape.push_back(shape[d]);
    }
    boxes.push_back(std::move(box));
  };
  if (dim == shape.size()) return add_rows(0, 1);
  const int64_t inner = product(shape, dim + 1);
  const auto in_row = [&](int64_t row, int64_t begin, int64_t end) {
    auto longer = prefix;
    longer.push_back(row);
    add_boxes(shape, std::move(longer), begin, end - begin, boxes);
  };
  const int64_t last = first + count;
  int64_t row = first / inner;
  if (first % inner != 0) {
    in_row(row, first % inner, std::min(inner, last - row * inner));
    ++row;
  }
  const int64_t full = last / inner;
  if (row < full) add_rows(row, full - row);
  if (full >= row && last % inner != 0) in_row(full, 0, last % inner);
}

}  // namespace

int64_t Box::count() const { return product(shape); }

Box whole_box(const std::vector<int64_t>& shape) {
  return {std::vector<int64_t>(shape.size(), 0), shape};
}

std::string to_text(const Box& box) {
  std::vector<std::string> words;
  for (size_t d = 0; d < box.shape.size(); ++d)
    words.push_back(cat(box.offset[d], ":", box.offset[d] + box.shape[d]));
  return cat("[", join(words, ", "), "]");
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  YOKE_CHECK(a.shape.size() == b.shape.size());
  Box box;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    if (begin >= end) return std::nullopt;
    box.offset.push_back(begin);
    box.shape.push_back(end - begin);
  }
  return box;
}

std::vector<Box> boxes_of_range(const std::vector<int64_t>& shape, int64_t first, int64_t count) {
  YOKE_CHECK(first >= 0 && count >= 0 && first + count <= product(shape));
  std::vector<Box> boxes;
  add_boxes(shape, {}, first, count, boxes);
  return boxes;
}

std::vector<Placed> place(const Box& local, const Cut& cut) {
  const auto dim = size_t(cut.dim);
  std::vector<Placed> result;
  const int64_t begin = local.offset[dim], end = begin + local.shape[dim];
  int64_t here = 0, there = 0;  // where the part begins, in the rank's tensor and in the whole one
  for (const int64_t part : cut.parts) {
    const int64_t mine = part / cut.ranks;
    const int64_t first = std::max(begin, here), last = std::min(end, here + mine);
    if (first < last) {
      Placed placed{local, local};
      placed.local.offset[dim] = first;
      placed.whole.offset[dim] = there + cut.rank * mine + first - here;
      placed.local.shape[dim] = placed.whole.shape[dim] = last - first;
      result.push_back(std::move(placed));
    }
    here += mine;
    there += part;
  }
  return result;
}

std::optional<std::string> find_gap(const std::vector<int64_t>& shape,
                                    const std::vector<Box>& boxes) {
  int64_t count = 0;
  for (const auto& box : boxes) {
    if (box.count() == 0) continue;
    if (intersect(box, whole_box(shape)) != box) return cat(to_text(box), " is not inside of it");
    count += box.count();
  }
  for (size_t i = 0; i < boxes.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (const auto both = intersect(boxes[i], boxes[j]))
        return cat(to_text(*both), " is there twice");
  if (count != product(shape))
    return cat(product(shape) - count, " of ", product(shape), " elements are missing");
  return std::nullopt;
}

}  // namespace yoke::plan
