// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/signature.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace yoke::comm {

TEST(Signature, ADecodedCallReadsLikeTheCall) {
  const at::Tensor large = at::empty({4, 2}), small = at::empty({3}, at::kLong);
  const std::vector<Operation> calls{
      {.kind = OpKind::AllReduce, .reduce = ReduceOp::Max, .inputs = {large}, .outputs = {large}},
      {.kind = OpKind::Gather, .root = 1, .inputs = {small}, .outputs = {small, small}},
      {.kind = OpKind::Send, .root = 2, .inputs = {small}},
      {.kind = OpKind::Split, .color = 3, .key = -1},
      {.kind = OpKind::Barrier}};
  for (const auto& call : calls) {
    const Operation copy = decode(encode(call));
    EXPECT_EQ(copy.text(), call.text());
    EXPECT_EQ(copy.bytes(), call.bytes());
    EXPECT_EQ(mismatch(call, 0, copy, 1), std::nullopt) << call.text();
  }
}

TEST(Signature, ADecodedCallDisagreesWithAnother) {
  auto reduction = [](int64_t count, at::ScalarType type) {
    const at::Tensor tensor = at::empty({count}, type);
    return Operation{.kind = OpKind::AllReduce,
                     .reduce = ReduceOp::Sum,
                     .inputs = {tensor},
                     .outputs = {tensor}};
  };
  const Operation other = decode(encode(reduction(4, at::kFloat)));
  EXPECT_EQ(mismatch(reduction(3, at::kFloat), 0, other, 1), "the shapes differ");
  EXPECT_EQ(mismatch(reduction(4, at::kInt), 0, other, 1), "the dtypes differ");
}

}  // namespace yoke::comm
