// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/generate.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/parallel/passing.h"

namespace yoke::models {

void Sampling::check() const {
  if (!(temperature >= 0) || top_k < 0 || !(top_p > 0 && top_p <= 1))
    fail(Kind::Usage,
         "sampling wants a temperature and top_k from 0 on and a top_p above 0 up to 1; got ",
         temperature, ", ", top_k, " and ", top_p);
}

int64_t choose(const at::Tensor& logits, const Sampling& sampling, uint64_t place) {
  const at::Tensor all = logits.to(at::kCPU, at::kFloat).contiguous();
  const float* values = all.const_data_ptr<float>();
  const int64_t size = all.numel();
  if (sampling.temperature == 0) return std::max_element(values, values + size) - values;
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int64_t a, int64_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  };
  if (sampling.top_k > 0 && sampling.top_k < size) {
    std::ranges::nth_element(order, order.begin() + sampling.top_k, before);
    order.resize(size_t(sampling.top_k));
  }
  if (sampling.top_p < 1) std::ranges::sort(order, before);
  const float most = values[*std::ranges::min_element(order, before)];
  std::vector<double> weights;
  for (const int64_t token : order)
    weights.push_back(std::exp(double(values[token] - most) / sampling.temperature));
  double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (sampling.top_p < 1) {
    double kept = 0;
    size_t count = 0;
    while (count < weights.size() && kept < sampling.top_p * sum) kept += weights[count++];
    weights.resize(count);
    sum = kept;
  }
  double drawn = double(Rng(sampling.seed, "generate").uniform(place)) * sum;
  for (size_t i = 0; i < weights.size(); ++i)
    if ((drawn -= weights[i]) < 0) return order[i];
  return order[weights.size() - 1];
}

std::vector<int64_t> generate(const Whole& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options) {
  options.sampling.check();
  const auto words = as_words(model.architecture());
  if (!words) fail(Kind::Usage, "text comes from a gpt or a llama, and this is another model");
  const int64_t seq = std::visit([](const auto& chosen) { return chosen.seq; }, *words);
  const int64_t vocab = std::visit([](const auto& chosen) { return chosen.vocab; }, *words);
  const auto given = int64_t(prompt.size());
  if (given == 0) fail(Kind::Usage, "a text begins with a prompt of one token or more");
  if (given > seq)
    fail(Kind::Usage, "the prompt has ", given, " tokens, and the model knows ", seq, " positions");
  for (const int64_t token : prompt)
    if (token < 0 || token >= vocab)
      fail(Kind::Usage, "the prompt has the token ", token, ", and the model knows ", vocab,
           " words: it has another tokenizer");
  const c10::InferenceMode no_gradients;
  const auto past = std::make_shared<parallel::KvCache>(
      std::min(seq, given + std::max<int64_t>(options.tokens, 1)));
  const parallel::Passing::Scope scope({.past = past});
  std::vector<int64_t> next = prompt, result;
  while (past->length() + int64_t(next.size()) <= past->most()) {
    const at::Tensor input = at::tensor(next, at::kLong).unsqueeze(0).to(model.model().device);
    const at::Tensor logits = model.forward_last(input)[0];
    past->advance(int64_t(next.size()));
    const int64_t token = choose(logits, options.sampling, uint64_t(past->length()));
    result.push_back(token);
    const bool goes_on = !options.on_token || options.on_token(token);
    if (!goes_on || token == options.end || int64_t(result.size()) >= options.tokens) break;
    next = {token};
  }
  return result;
}

}  // namespace yoke::models
