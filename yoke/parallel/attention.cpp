// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/attention.h"

#include <ATen/Functions.h>

#include "yoke/base/error.h"
#include "yoke/parallel/passing.h"

namespace yoke::parallel {

AttentionImpl::AttentionImpl(AttentionOptions options) : options_(options) {
  auto& [dim, heads, kv_heads, head_dim, bias, out_bias, causal, rotary] = options_;
  if (kv_heads == 0) kv_heads = heads;
  if (dim < 1 || heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    fail(Kind::Usage,
         "attention wants a dim and heads from 1 on, and kv_heads that divide heads; got ", dim,
         ", ", heads, " and ", kv_heads);
  if (head_dim == 0 && dim % heads != 0)
    fail(Kind::Usage, dim, " dims cannot be cut into ", heads, " equal heads; give head_dim");
  if (head_dim == 0) head_dim = dim / heads;
  qkv = register_module(
      "qkv", Linear(torch::nn::LinearOptions(dim, (heads + 2 * kv_heads) * head_dim).bias(bias)));
  out = register_module("out",
                        Linear(torch::nn::LinearOptions(heads * head_dim, dim).bias(out_bias)));
  rotary_ = Rotary(head_dim, rotary);
}

void AttentionImpl::split_heads(const TensorAxis& axis) {
  auto& [dim, heads, kv_heads, head_dim, bias, out_bias, causal, rotary] = options_;
  const int64_t mine = axis.part_of(heads, "attention heads");
  const int64_t kv_mine = axis.part_of(kv_heads, "attention heads of keys and values");
  qkv->split_outputs(axis, {heads * head_dim, kv_heads * head_dim, kv_heads * head_dim});
  out->split_inputs(axis);
  heads = mine;
  kv_heads = kv_mine;
}

at::Tensor AttentionImpl::forward(const at::Tensor& input) {
  const auto& [dim, heads, kv_heads, head_dim, bias, out_bias, causal, rotary] = options_;
  const at::Tensor all = qkv(input);
  const int64_t batch = all.size(0), tokens = all.size(1);
  // In one go: backward then puts the gradients together in one.
  const auto parts =
      all.split_with_sizes({heads * head_dim, kv_heads * head_dim, kv_heads * head_dim}, /*dim=*/2);
  auto by_head = [&, size = head_dim](const at::Tensor& part, int64_t count) {
    return part.view({batch, tokens, count, size}).transpose(1, 2);  // [batch, heads, tokens, size]
  };
  const auto& [documents, target, past] = Passing::current();
  const int64_t before = past ? past->length() : 0;
  const at::Tensor q = rotary_.turn(by_head(parts[0], heads), before);
  at::Tensor k = rotary_.turn(by_head(parts[1], kv_heads), before), v = by_head(parts[2], kv_heads);
  if (past) std::tie(k, v) = past->extend(this, k, v);
  const bool is_whole = before == 0 && !documents.defined();  // else a mask says who sees whom
  std::optional<at::Tensor> mask;
  if (documents.defined()) mask = (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1);
  if (!is_whole && causal && tokens > 1) {
    const at::Tensor earlier =
        at::ones({tokens, before + tokens}, q.options().dtype(at::kBool)).tril(before);
    mask = mask ? mask->logical_and(earlier) : earlier;
  }
  const at::Tensor mixed =
      at::scaled_dot_product_attention(q, k, v, mask, 0, causal && is_whole && tokens > 1,
                                       std::nullopt, /*enable_gqa=*/kv_heads < heads);
  return out(mixed.transpose(1, 2).reshape({batch, tokens, heads * head_dim}));
}

}  // namespace yoke::parallel
