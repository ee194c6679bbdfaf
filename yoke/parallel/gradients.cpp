// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/gradients.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "yoke/base/error.h"

namespace yoke::parallel {

Gradients::Gradients(std::shared_ptr<const plan::Layout> layout,
                     const std::vector<ModelParameter>& parameters, const comm::Communicator& comm,
                     Options options)
    : layout_(std::move(layout)),
      parameters_(parameters),
      comm_(comm),
      options_(std::move(options)),
      buckets_(layout_->buckets.size()),
      states_(parameters.size()),
      used_(parameters.size(), false) {
  const auto kind = at::device(options_.device).dtype(options_.dtype);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const auto& plan = layout_->buckets[b];
    const int64_t size = layout_->shard_count(plan);
    for (const auto& slot : plan.slots) {
      states_[size_t(slot.parameter)].bucket = b;
      states_[size_t(slot.parameter)].slot = slot;
    }
    if (keeps_buckets()) {
      provide(b);
      buckets_[b].shard = buckets_[b].full.narrow(0, comm_.rank() * size, size);
    } else {
      buckets_[b].shard = at::zeros({size}, kind);
    }
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    states_[p].bound.assign(parameters_[p].leaves.size(), false);
    for (size_t leaf = 0; leaf < parameters_[p].leaves.size(); ++leaf) {
      leaves_[parameters_[p].leaves[leaf].unsafeGetTensorImpl()] = {int(p), leaf};
      const auto node = torch::autograd::impl::grad_accumulator(parameters_[p].leaves[leaf]);
      const auto key = node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, p, leaf](const auto& outputs, const auto&) {
            hook(int(p), leaf);
            return outputs;
          }));
      remove_hooks_.emplace_back([node, key] { node->del_post_hook(key); });
    }
  }
}

Gradients::~Gradients() {
  for (const auto& remove : remove_hooks_) remove();
}

void Gradients::begin(bool reduce, Range range, std::function<void(size_t)> on_reduce) {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!range.has(b) && b < options_.first_shared) continue;
    Bucket& bucket = buckets_[b];
    bucket.num_ready = 0;
    for (const auto& slot : layout_->buckets[b].slots)
      states_[size_t(slot.parameter)].num_arrived = 0;
    if (!bucket.reduced) continue;
    settle(b);
    if (keeps_buckets()) bucket.carry = owned(b).clone();  // the first reduction is kept apart
    empty_places(b);
    bucket.reduced = false;
  }
  order_.clear();
  range_ = range;
  next_ = range.begin;
  active_ = true;
  reducing_ = reduce;
  on_reduce_ = std::move(on_reduce);
}

void Gradients::end() {
  const at::NoGradGuard no_grad;
  if (reducing_ && range_.begin < range_.end) reduce_up_to(range_.end - 1);
  for (size_t b = 0; b < buckets_.size(); ++b) copy_values(b);
  active_ = reducing_ = false;
}

void Gradients::hook(int parameter, size_t leaf) {
  if (!active_) return;
  if (!parameters_[size_t(parameter)].leaves[leaf].grad().defined())
    return;  // a layer that will bring it later
  const at::NoGradGuard no_grad;
  State& state = states_[size_t(parameter)];
  if (!range_.has(state.bucket) && state.bucket < options_.first_shared)
    fail(Kind::Usage, "parameter '", parameters_[size_t(parameter)].name,
         "' has a gradient in the pass of another part; what two parts use is to be shared (ties)");
  if (state.num_arrived == int(parameters_[size_t(parameter)].leaves.size()))
    fail(Kind::Usage, "parameter '", parameters_[size_t(parameter)].name,
         "' had its gradient twice in one backward pass: it is used in several recomputed parts, "
         "or in one and outside; keep it out of them");
  absorb(parameter, leaf);
  used_[size_t(parameter)] = true;
  if (++state.num_arrived < int(parameters_[size_t(parameter)].leaves.size()) ||
      !range_.has(state.bucket))  // what is shared is complete after the last pass
    return;
  order_.push_back(parameter);
  ++buckets_[state.bucket].num_ready;
  while (reducing_ && next_ < range_.end &&
         buckets_[next_].num_ready == int(layout_->buckets[next_].slots.size()))
    launch(next_++);
}

void Gradients::deliver(const at::Tensor& leaf, const at::Tensor& value, bool last) {
  const at::NoGradGuard no_grad;
  const auto [parameter, index] = leaves_.at(leaf.unsafeGetTensorImpl());
  at::Tensor& gradient = leaf.mutable_grad();
  if (gradient.defined()) {
    if (states_[size_t(parameter)].bound[index]) copy_values(states_[size_t(parameter)].bucket);
    gradient.add_(value);
  } else {
    gradient = value;
  }
  if (last) hook(parameter, index);
}

void Gradients::absorb(int parameter, size_t leaf) {
  at::Tensor& gradient = parameters_[size_t(parameter)].leaves[leaf].mutable_grad();
  State& state = states_[size_t(parameter)];
  if (!state.place.defined()) provide(state.bucket);
  const bool sparse = gradient.is_sparse();
  if (!sparse && gradient.is_alias_of(state.place)) return;  // autograd has added to it
  if (state.bound[leaf])
    fail(Kind::Usage, "the gradient of '", parameters_[size_t(parameter)].name,
         "' has left its buffer: it was replaced or cleared (zero_grad) between two passes of one "
         "step; Optimizer::step() clears the gradients");
  const at::Tensor value = sparse ? gradient.to_dense() : gradient;
  Bucket& bucket = buckets_[state.bucket];
  if (state.filled) {
    copy_values(state.bucket);
    state.place.add_(value);
  } else if (options_.device.is_cpu()) {
    state.place.copy_(value);  // while it is in the cache
  } else {
    bucket.places.push_back(state.place);  // a kernel for each costs more than its copy
    bucket.values.push_back(value);
  }
  state.filled = true;
  if (keeps_buckets() && value.scalar_type() == options_.dtype) {
    gradient = state.place;
    state.bound[leaf] = true;
  } else {
    gradient.reset();
  }
}

void Gradients::copy_values(size_t b) {
  Bucket& bucket = buckets_[b];
  if (bucket.places.empty()) return;
  at::_foreach_copy_(bucket.places, bucket.values);
  bucket.places.clear();
  bucket.values.clear();
}

void Gradients::provide(size_t b) {
  Bucket& bucket = buckets_[b];
  const auto& plan = layout_->buckets[b];
  const auto kind = at::device(options_.device).dtype(options_.dtype);
  if (keeps_buckets()) {
    bucket.full = comm_.allocate({plan.count}, kind);
  } else {
    if (pool_.empty() && !in_flight_.empty()) take_in(in_flight_.front());
    if (pool_.empty()) {
      pool_.push_back(comm_.allocate({layout_->largest()}, kind));
      num_allocated_ += layout_->largest();
    }
    bucket.block = std::move(pool_.back());
    pool_.pop_back();
    bucket.full = bucket.block.narrow(0, 0, plan.count);
  }
  clear_gaps(plan, bucket.full);
  for (const auto& slot : plan.slots)
    states_[size_t(slot.parameter)].place =
        bucket.full.narrow(0, slot.offset, slot.count)
            .view(layout_->parameters[size_t(slot.parameter)].shape);
}

// What lies between the parameters is stepped with them, and counts in the norm.
void Gradients::clear_gaps(const plan::Bucket& plan, const at::Tensor& tensor) const {
  int64_t end = 0;
  auto clear_to = [&](int64_t begin) {
    if (end < begin) tensor.narrow(0, end, begin - end).zero_();
  };
  for (const auto& slot : plan.slots) {
    clear_to(slot.offset);
    end = slot.offset + slot.count;
  }
  clear_to(plan.count);
}

void Gradients::fill(size_t b) {
  if (!buckets_[b].full.defined()) provide(b);
  copy_values(b);
  for (const auto& slot : layout_->buckets[b].slots) {
    State& state = states_[size_t(slot.parameter)];
    if (!state.filled) state.place.zero_();
    state.filled = true;
  }
}

void Gradients::sum_over(const comm::Communicator& group, Range range) {
  const at::NoGradGuard no_grad;
  for (size_t b = range.begin; b < range.end; ++b) {
    fill(b);
    group.all_reduce(buckets_[b].full).wait();
    for (const auto& slot : layout_->buckets[b].slots) used_[size_t(slot.parameter)] = true;
  }
}

void Gradients::reduce_up_to(size_t bucket) {
  const at::NoGradGuard no_grad;
  while (next_ <= bucket) launch(next_++);
}

void Gradients::launch(size_t b) {
  Bucket& bucket = buckets_[b];
  fill(b);
  if (options_.zero == 0) {
    bucket.work = options_.wire->all_reduce(comm_, bucket.full);
  } else {
    if (bucket.has_sum) bucket.fresh = at::empty_like(bucket.shard);
    bucket.work = options_.wire->reduce_scatter(comm_, bucket.has_sum ? bucket.fresh : bucket.shard,
                                                bucket.full);
  }
  in_flight_.push_back(b);
  bucket.reduced = true;
  if (on_reduce_) on_reduce_(b);
}

void Gradients::take_in(size_t b) {
  std::erase(in_flight_, b);
  Bucket& bucket = buckets_[b];
  bucket.work.wait();
  bucket.work = {};
  if (keeps_buckets()) return;
  if (bucket.has_sum) bucket.shard.add_(bucket.fresh);
  bucket.fresh.reset();
  bucket.has_sum = true;
  for (const auto& slot : layout_->buckets[b].slots) states_[size_t(slot.parameter)].place.reset();
  pool_.push_back(std::move(bucket.block));
  bucket.block.reset();
  bucket.full.reset();
}

void Gradients::settle(size_t b) {
  if (std::ranges::find(in_flight_, b) != in_flight_.end()) take_in(b);
  if (!buckets_[b].carry.defined()) return;
  owned(b).add_(buckets_[b].carry);
  buckets_[b].carry.reset();
}

void Gradients::await() {
  const at::NoGradGuard no_grad;
  while (!in_flight_.empty()) settle(in_flight_.front());
  for (size_t b = 0; b < buckets_.size(); ++b) settle(b);
}

at::Tensor Gradients::owned(size_t bucket) const {
  return options_.zero == 0 ? buckets_[bucket].full : buckets_[bucket].shard;
}

at::Tensor Gradients::shard(size_t bucket) const { return buckets_[bucket].shard; }

void Gradients::clear() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    empty_places(b);
    buckets_[b].has_sum = buckets_[b].reduced = false;
  }
  used_.assign(used_.size(), false);
}

void Gradients::empty_places(size_t b) {
  for (const auto& slot : layout_->buckets[b].slots) {
    const auto p = size_t(slot.parameter);
    states_[p].filled = false;
    states_[p].bound.assign(parameters_[p].leaves.size(), false);
    for (const auto& leaf : parameters_[p].leaves) leaf.mutable_grad().reset();
  }
}

void Gradients::abandon() {
  clear();
  active_ = reducing_ = false;
  in_flight_.clear();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.work = {};
    bucket.places.clear();
    bucket.values.clear();
    bucket.carry.reset();
    bucket.fresh.reset();
    if (keeps_buckets() || !bucket.full.defined()) continue;
    num_allocated_ -= bucket.block.numel();
    bucket.block.reset();
    bucket.full.reset();
    for (const auto& slot : layout_->buckets[b].slots)
      states_[size_t(slot.parameter)].place.reset();
  }
}

void Gradients::adopt(const Gradients& other) {
  const at::NoGradGuard no_grad;
  used_ = other.used_;
  order_ = other.order_;
  for (size_t p = 0; p < states_.size(); ++p) {
    const State& theirs = other.states_[p];
    if (!theirs.filled) continue;
    State& mine = states_[p];
    mine.place.copy_(theirs.place);
    mine.filled = true;
    mine.bound = theirs.bound;
    for (const auto& leaf : parameters_[p].leaves)
      if (leaf.grad().defined() && leaf.grad().is_alias_of(theirs.place))
        leaf.mutable_grad() = mine.place;
  }
}

int64_t Gradients::bytes() const {
  int64_t elements = 0;
  for (const auto& bucket : buckets_)
    elements += keeps_buckets() ? bucket.full.numel() : bucket.shard.numel();
  return elements * int64_t(c10::elementSize(options_.dtype));
}

int64_t Gradients::pool_bytes() const {
  return num_allocated_ * int64_t(c10::elementSize(options_.dtype));
}

}  // namespace yoke::parallel
