// SPDX-License-Identifier: Apache-2.0
// One rank's part in one operation, in the normal form that every backend gets: checked, flat and
// contiguous. What the caller's tensors lack of that is made good by copies before and after.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace yoke::comm {

enum class ReduceOp { Sum, Mean, Min, Max, Product };

enum class OpKind {
  AllReduce,
  AllGather,
  ReduceScatter,
  Broadcast,
  Reduce,
  Gather,
  Scatter,
  AllToAll,
  Barrier,
  Split,
  Send,
  Recv
};

const char* to_string(ReduceOp op);
const char* to_string(OpKind kind);

struct Operation {
  struct Copy {
    at::Tensor from, to;
  };

  OpKind kind;
  std::optional<ReduceOp> reduce = {};
  int root = -1;  // of a rooted collective; the peer of a send or recv
  // What this rank gives and gets, one tensor for each rank where the kind tells them apart
  // (all_to_all: both; all_gather, gather: outputs; reduce_scatter, scatter: inputs), else one.
  std::vector<at::Tensor> inputs = {};
  std::vector<at::Tensor> outputs = {};
  std::vector<Copy> before = {};  // to run when the operation starts, in order
  std::vector<Copy> after = {};   // to run when it is over
  int color = 0, key = 0;         // of a split

  bool rooted() const;
  bool point_to_point() const { return kind == OpKind::Send || kind == OpKind::Recv; }
  // The tensor that stands for the operation in its signature: shape, dtype, device. May be
  // undefined.
  const at::Tensor& subject() const;
  uint64_t bytes() const;
  // "all_reduce(sum, float32 [4, 2])": how the call reads in an error message.
  std::string text() const;
};

// Why two ranks' parts of a collective do not belong together; nothing if they do.
std::optional<std::string> mismatch(const Operation& a, int rank_a, const Operation& b, int rank_b);
// The same for the two sides of a message.
std::optional<std::string> message_mismatch(at::ScalarType sent, int64_t num_sent,
                                            at::ScalarType wanted, int64_t num_wanted);

// What everybody hears then. A call is its rank, as the world counts, and its text.
struct Called {
  int rank;
  std::string text;
};
std::string disagreement(const std::string& reason, const Called& one, const Called& other,
                         uint64_t sequence, const std::string& group, bool message = false);

}  // namespace yoke::comm
