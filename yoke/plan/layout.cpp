// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/layout.h"

#include <algorithm>
#include <numeric>

#include "yoke/base/error.h"

namespace yoke::plan {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Bucket make_bucket(const std::vector<Parameter>& parameters, std::vector<int> members,
                   int num_shards) {
  std::ranges::stable_partition(members,
                                [&](int p) { return parameters[size_t(p)].shape.size() >= 2; });
  Bucket bucket;
  for (const int p : members) {
    const int64_t count = parameters[size_t(p)].count();
    bucket.slots.push_back({p, bucket.count, count});
    bucket.count += round_up(count, kAlign);
  }
  bucket.count = round_up(std::max<int64_t>(1, bucket.count), kAlign * num_shards);
  return bucket;
}

}  // namespace

int64_t Parameter::count() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Layout make_layout(std::vector<Parameter> parameters, const std::vector<std::vector<int>>& buckets,
                   int num_shards) {
  YOKE_CHECK(num_shards >= 1);
  std::vector<int> seen(parameters.size(), 0);
  for (const auto& members : buckets)
    for (const int p : members) ++seen.at(size_t(p));
  YOKE_CHECK(std::ranges::all_of(seen, [](int n) { return n == 1; }),
             "a parameter is in no bucket, or in two");
  Layout layout{.num_shards = num_shards};
  for (const auto& members : buckets)
    layout.buckets.push_back(make_bucket(parameters, members, num_shards));
  layout.parameters = std::move(parameters);
  return layout;
}

Layout make_layout(std::vector<Parameter> parameters, const std::vector<std::vector<int>>& groups,
                   int num_shards, BucketSizes sizes) {
  std::vector<std::vector<int>> buckets;
  for (const auto& group : groups) {
    int64_t room = 0;  // in the last bucket
    for (const int p : group) {
      if (room <= 0) {
        room = buckets.empty() ? sizes.first : sizes.usual;
        buckets.emplace_back();
      }
      buckets.back().push_back(p);
      room -= parameters.at(size_t(p)).count();
    }
  }
  return make_layout(std::move(parameters), buckets, num_shards);
}

bool same_buckets(const Layout& a, const Layout& b) {
  auto members = [](const Bucket& bucket) {
    std::vector<int> result;
    for (const auto& slot : bucket.slots) result.push_back(slot.parameter);
    std::ranges::sort(result);
    return result;
  };
  return std::ranges::equal(a.buckets, b.buckets, {}, members, members);
}

void put_bucket(Layout& layout, size_t bucket, const std::vector<Parameter>& parameters) {
  std::vector<int> members(parameters.size());
  std::iota(members.begin(), members.end(), int(layout.parameters.size()));
  layout.parameters.insert(layout.parameters.end(), parameters.begin(), parameters.end());
  layout.buckets.at(bucket) = make_bucket(layout.parameters, std::move(members), layout.num_shards);
}

std::vector<Piece> Layout::pieces(const Bucket& bucket, int shard) const {
  const int64_t begin = shard * shard_count(bucket), end = begin + shard_count(bucket);
  std::vector<Piece> result;
  for (const auto& slot : bucket.slots) {
    const int64_t first = std::max(begin, slot.offset),
                  last = std::min(end, slot.offset + slot.count);
    if (first < last)
      result.push_back({slot.parameter, first - begin, last - first, first - slot.offset});
  }
  return result;
}

int64_t Layout::num_elements() const {
  int64_t total = 0;
  for (const auto& parameter : parameters) total += parameter.count();
  return total;
}

int64_t Layout::largest() const {
  int64_t count = 0;
  for (const auto& bucket : buckets) count = std::max(count, bucket.count);
  return count;
}

int64_t Layout::num_padded() const {
  int64_t total = 0;
  for (const auto& bucket : buckets) total += bucket.count;
  return total;
}

std::string Layout::text() const {
  std::string text;
  for (size_t b = 0; b < buckets.size(); ++b) {
    text += cat("bucket ", b, ": ", buckets[b].count, " in ", num_shards, " of ",
                shard_count(buckets[b]), ":");
    for (const auto& slot : buckets[b].slots)
      text += cat(" ", parameters[size_t(slot.parameter)].name, "@", slot.offset);
    text += "\n";
  }
  return text;
}

Memory memory_of(const Layout& layout, int zero, Widths widths, bool reshard) {
  const int64_t full = layout.num_padded(), shard = full / layout.num_shards;
  Memory memory;
  memory.parameters = (zero < 3 ? full : shard) * widths.parameter;
  memory.gradients = (zero < 2 ? full : shard) * widths.gradient;
  memory.optimizer = (zero < 1 ? full : shard) * widths.optimizer;
  // Two buckets of gradients on their way; and, gathered, the one in use and the next.
  if (zero >= 2) memory.pool += 2 * layout.largest() * widths.gradient;
  if (zero >= 3) memory.pool += (reshard ? 2 * layout.largest() : full) * widths.parameter;
  return memory;
}

}  // namespace yoke::plan
