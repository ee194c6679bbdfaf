// SPDX-License-Identifier: Apache-2.0
// Where the parameters of a model lie in flat buffers. A bucket is one run of memory that holds
// several parameters and travels as a whole; it is cut into equal shards, of which rank r owns the
// r-th. Starts of parameters and bounds of shards are multiples of kAlign elements, so that
// vectorised arithmetic rounds alike in every layout. Values: every rank computes an equal one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace yoke::plan {

constexpr int64_t kAlign = 64;  // elements

struct Parameter {
  std::string name = {};
  std::vector<int64_t> shape = {};
  int64_t count() const;
  bool operator==(const Parameter&) const = default;
};

struct Slot {
  int parameter = 0;   // index among the layout's
  int64_t offset = 0;  // elements from the start of the bucket
  int64_t count = 0;
  bool operator==(const Slot&) const = default;
};

struct Bucket {
  std::vector<Slot> slots = {};  // ascending
  int64_t count = 0;             // elements, a multiple of kAlign x shards
  bool operator==(const Bucket&) const = default;
};

// The part of a slot that lies in a shard; offsets from the start of the shard.
struct Piece {
  int parameter = 0;
  int64_t offset = 0;
  int64_t count = 0;
  int64_t first = 0;  // element of the parameter that comes first
};

struct Layout {
  std::vector<Parameter> parameters = {};
  std::vector<Bucket> buckets = {};  // in the order in which they are communicated
  int num_shards = 1;

  int64_t shard_count(const Bucket& bucket) const { return bucket.count / num_shards; }
  std::vector<Piece> pieces(const Bucket& bucket, int shard) const;
  int64_t num_elements() const;  // of all parameters
  int64_t largest() const;       // of a bucket
  int64_t num_padded() const;    // of all buckets
  std::string text() const;      // one line for each bucket
};

struct BucketSizes {
  int64_t usual = 0;  // elements; a bucket is closed when it has them
  int64_t first = 0;  // the first one is small, so that communication starts early
};

// Buckets of the parameters in the order of the groups; none has parameters of two. Inside a bucket
// matrices come before vectors, which optimizers treat otherwise.
Layout make_layout(std::vector<Parameter> parameters, const std::vector<std::vector<int>>& groups,
                   int num_shards, BucketSizes sizes);
// Buckets as given.
Layout make_layout(std::vector<Parameter> parameters, const std::vector<std::vector<int>>& buckets,
                   int num_shards);

// Whether each bucket has the same parameters, in any order.
bool same_buckets(const Layout& a, const Layout& b);

// For a layout that is made while the model is: one more bucket, of parameters that come after
// those it has. `layout.buckets` has a place for it.
void put_bucket(Layout& layout, size_t bucket, const std::vector<Parameter>& parameters);

// Bytes of one rank; ZeRO (Rajbhandari et al., SC 2020) stages 0 to 3.
struct Memory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t pool = 0;       // of buckets that are passing through
  int64_t optimizer = 0;  // master weights and moments
  int64_t total() const { return parameters + gradients + pool + optimizer; }
};
struct Widths {
  int64_t parameter = 4;
  int64_t gradient = 4;
  int64_t optimizer = 8;  // bytes of state for each parameter, master weights included
};
// `reshard`: stage 3 drops after forward what it gathered.
Memory memory_of(const Layout& layout, int zero, Widths widths, bool reshard = true);

}  // namespace yoke::plan
