// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/signature.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "yoke/base/error.h"

namespace yoke::comm {

TEST(Signature, ReadsTheSameAfterTheJourney) {
  const at::Tensor matrix = at::empty({3, 2}, at::kHalf), none = at::empty({0}, at::kHalf);
  const std::vector<Operation> calls{
      {.kind = OpKind::AllReduce, .reduce = ReduceOp::Max, .inputs = {matrix}, .outputs = {matrix}},
      {.kind = OpKind::AllToAll, .inputs = {matrix, none}, .outputs = {none, none}},
      {.kind = OpKind::Broadcast, .root = 3, .inputs = {none}, .outputs = {none}},
      {.kind = OpKind::Split, .color = -1, .key = 7},
      {.kind = OpKind::Barrier}};
  for (const auto& call : calls) {
    const Operation copy = decode(encode(call));
    EXPECT_EQ(copy.text(), call.text());
    for (const auto& other : calls)
      EXPECT_EQ(mismatch(copy, 0, other, 1), mismatch(call, 0, other, 1)) << call.text();
  }
}

TEST(Signature, ThatIsCutShortIsRefused) {
  const std::string bytes = encode({.kind = OpKind::Barrier});
  EXPECT_THROW(decode(std::string_view(bytes).substr(0, bytes.size() - 1)), Error);
}

}  // namespace yoke::comm
