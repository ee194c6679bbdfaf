// SPDX-License-Identifier: Apache-2.0
// What layers may know of the samples that pass through them, besides what the layer before gives:
// the calling thread says it around their forward. What is computed again knows it again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

namespace yoke::parallel {

// Keys and values of the tokens before, for a model that goes on where it has stopped. Each
// attention has its own in it. Threads: one at a time.
class KvCache {
 public:
  explicit KvCache(int64_t most) : most_(most) {}  // tokens
  int64_t length() const { return length_; }       // tokens that have passed through all layers
  int64_t most() const { return most_; }
  // Those of an attention with its new ones, [batch, heads, tokens so far, size]. Throws
  // Kind::Usage beyond the most.
  std::pair<at::Tensor, at::Tensor> extend(const void* attention, const at::Tensor& keys,
                                           const at::Tensor& values);
  // So many tokens have passed.
  void advance(int64_t tokens);

 private:
  const int64_t most_;
  int64_t length_ = 0;
  std::map<const void*, std::pair<at::Tensor, at::Tensor>> kept_;
};

struct Passing {
  // [batch, tokens] of any numbers that grow: a token sees those of its own document alone.
  at::Tensor documents = {};
  at::Tensor target = {};  // for a layer that gives the loss itself
  std::shared_ptr<KvCache> past = nullptr;

  // Of the calling thread; outside of a scope it is empty.
  static const Passing& current();
  class Scope;
};

class Passing::Scope {
 public:
  explicit Scope(Passing passing);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const Passing mine_;
  const Passing* const outer_;
};

// The place of each token in its document, [batch, tokens].
at::Tensor places_in(const at::Tensor& documents);

}  // namespace yoke::parallel
