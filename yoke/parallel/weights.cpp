// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/weights.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/comm/error_text.h"

namespace yoke::parallel {

Weights::Weights(std::shared_ptr<const plan::Layout> layout,
                 const std::vector<ModelParameter>& parameters, const comm::Communicator& comm,
                 Options options)
    : layout_(std::move(layout)),
      parameters_(parameters),
      comm_(comm),
      options_(options),
      buckets_(layout_->buckets.size()) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].weights = this;
    buckets_[b].index = b;
  }
  if (options_.zero == 3 || (options_.zero > 0 && comm_.size() > 1))
    observer_ = std::make_unique<TouchObserver>();
}

void Weights::add(size_t b, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  adding_ = true;
  const auto kind = at::device(options_.device).dtype(options_.dtype);
  const plan::Bucket& plan = layout_->buckets[b];
  Bucket& bucket = buckets_[b];
  const at::ScalarType source =
      plan.slots.empty() ? options_.dtype : values[size_t(plan.slots[0].parameter)].scalar_type();
  const int64_t size = layout_->shard_count(plan);
  auto mine = [&](const at::Tensor& all) { return all.narrow(0, comm_.rank() * size, size); };
  // Under ZeRO 3 one bucket at a time is whole.
  bucket.memory =
      options_.zero < 3 ? comm_.allocate({plan.count}, kind) : at::empty({plan.count}, kind);
  const at::Tensor all =
      source == options_.dtype ? bucket.memory : at::empty({plan.count}, kind.dtype(source));
  all.zero_();
  for (const auto& slot : plan.slots)
    all.narrow(0, slot.offset, slot.count).copy_(values[size_t(slot.parameter)].reshape({-1}));
  comm_.broadcast(all, 0).wait();
  if (source != options_.dtype) {
    bucket.memory.copy_(all);
    bucket.masters = (options_.zero == 0 ? all : mine(all)).clone();
  }
  bucket.params = make_touchable(&bucket, plan.count, kind, bucket.memory.mutable_data_ptr());
  for (const auto& slot : plan.slots)
    for (at::Tensor leaf : parameters_[size_t(slot.parameter)].leaves)
      leaf.set_data(view(slot, bucket));
  bucket.shard = mine(bucket.memory);
  if (options_.zero == 3) {
    bucket.shard = comm_.allocate({size}, kind).copy_(bucket.shard);
    bucket.memory.reset();
    move_memory(bucket.params, nullptr);
  }
  adding_ = false;
}

// One block is always there, so that an operation that cannot have its parameters finds memory.
void Weights::start() {
  if (options_.zero < 3) return;
  const int64_t largest = layout_->largest();
  pool_.push_back(comm_.allocate({largest}, at::device(options_.device).dtype(options_.dtype)));
  num_allocated_ = largest;
}

Weights::~Weights() {
  observer_.reset();  // nothing is gathered any more
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    if (!bucket.params.defined()) continue;  // it was not added
    for (const auto& slot : layout_->buckets[bucket.index].slots)
      for (at::Tensor leaf : parameters_[size_t(slot.parameter)].leaves)
        if (options_.zero == 3 && owner_of(leaf) == &bucket)
          leaf.set_data(at::empty({0}, leaf.options()));
    if (options_.zero == 3) continue;
    // Into ordinary memory: the model may outlive the backend, which would live on with its own.
    at::Tensor kept = bucket.memory;
    const auto& slots = layout_->buckets[bucket.index].slots;
    const bool used = std::ranges::any_of(slots, [&](const auto& slot) {
      return owner_of(parameters_[size_t(slot.parameter)].tensor()) == &bucket;
    });
    try {
      await(bucket);
      if (used) kept = bucket.memory.clone();
    } catch (const std::exception&) {
      // The world has failed, and says so to whoever runs it.
    }
    settle_memory(bucket.params, kept);
    bucket.memory.reset();
    bucket.shard.reset();
  }
}

at::Tensor Weights::view(const plan::Slot& slot, const Bucket& bucket) const {
  return bucket.params.narrow(0, slot.offset, slot.count)
      .view(layout_->parameters[size_t(slot.parameter)].shape);
}

at::Tensor Weights::owned(size_t bucket) const {
  return options_.zero == 0 ? buckets_[bucket].memory : buckets_[bucket].shard;
}

at::Tensor Weights::masters(size_t bucket) const {
  return buckets_[bucket].masters.defined() ? buckets_[bucket].masters : owned(bucket);
}

int64_t Weights::pool_bytes() const {
  return num_allocated_ * int64_t(c10::elementSize(options_.dtype));
}

void Weights::updated() {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_)
    if (bucket.masters.defined()) owned(bucket.index).copy_(bucket.masters);
  if (options_.zero == 3) return release_all();
  if (options_.zero == 0) return;
  // The first layers, which are the last buckets, are wanted first.
  for (auto bucket = buckets_.rbegin(); bucket != buckets_.rend(); ++bucket) {
    bucket->gathering = comm_.all_gather(bucket->memory, bucket->shard);
    bucket->pending = true;
  }
}

void Weights::gather_all() {
  keep_all_ = true;
  for (auto& bucket : buckets_) {
    if (!bucket.memory.defined()) gather(bucket);
    await(bucket);
  }
}

void Weights::release_all() {
  keep_all_ = false;
  if (options_.zero < 3) return;
  for (auto& bucket : buckets_) release(bucket);
  visits_.clear();
  events_.clear();
}

void Weights::fetch(size_t bucket) {
  const at::NoGradGuard no_grad;
  if (options_.zero == 3 && !buckets_[bucket].memory.defined()) gather(buckets_[bucket]);
}

void Weights::drop(size_t bucket) {
  if (options_.zero == 3 && !keep_all_) release(buckets_[bucket]);
}

void Weights::gather(Bucket& bucket) {
  const int64_t count = layout_->buckets[bucket.index].count;
  at::Tensor block;  // the smallest of the pool that is large enough
  for (const auto& b : pool_)
    if (b.numel() >= count && (!block.defined() || b.numel() < block.numel())) block = b;
  bucket.temporary = false;
  if (block.defined()) {
    std::erase_if(pool_, [&](const auto& b) { return b.is_same(block); });
  } else {
    // Where blocks rotate, any must do for any bucket.
    const int64_t size = options_.reshard_after_forward && !keep_all_ ? layout_->largest() : count;
    block = comm_.allocate({size}, at::device(options_.device).dtype(options_.dtype));
    num_allocated_ += size;
    bucket.temporary = keep_all_;
  }
  bucket.memory = block;
  move_memory(bucket.params, block.mutable_data_ptr());
  bucket.gathering = comm_.all_gather(block.narrow(0, 0, count), bucket.shard);
  bucket.pending = true;
}

void Weights::await(Bucket& bucket) {
  if (!bucket.pending) return;
  bucket.pending = false;
  bucket.gathering.wait();
  bucket.gathering = {};
}

void Weights::release(Bucket& bucket) {
  if (!bucket.memory.defined()) return;
  await(bucket);
  move_memory(bucket.params, nullptr);
  if (bucket.temporary)
    num_allocated_ -= bucket.memory.numel();
  else
    pool_.push_back(bucket.memory);
  bucket.memory.reset();
}

void Weights::touched(Bucket& bucket, Touch touch) noexcept {
  if (adding_) return;
  if (failure_) return lend(bucket);
  try {
    const at::NoGradGuard no_grad;
    visit(bucket, touch);
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    lend(bucket);  // the operation goes on; check() tells
    if (comm_.size() > 1) comm_.abort(comm::text_of(error));
  }
}

void Weights::lend(Bucket& bucket) noexcept {
  if (bucket.memory.defined()) return;
  const int64_t count = layout_->buckets[bucket.index].count;
  auto enough = [&](const at::Tensor& block) { return block.defined() && block.numel() >= count; };
  for (const auto& block : pool_)
    if (enough(block)) bucket.memory = block;
  for (const auto& other : buckets_)
    if (enough(other.memory)) bucket.memory = other.memory;
  YOKE_CHECK(bucket.memory.defined());  // one is always there
  move_memory(bucket.params, bucket.memory.mutable_data_ptr());
}

void Weights::visit(Bucket& bucket, Touch touch) {
  bucket.used_by = touch.operation;
  if (options_.by_hand) fetch(bucket.index);
  if (options_.zero < 3 || keep_all_ || options_.by_hand) return await(bucket);
  const bool again = !visits_.empty() && visits_.back() == bucket.index;
  if (again) return await(bucket);
  const size_t previous = visits_.empty() ? bucket.index : visits_.back();
  visits_.push_back(bucket.index);
  note({Event::What::Visit, bucket.index, touch});
  const auto next = foresee();
  if (touch.outermost)
    for (auto& other : buckets_)
      if (other.used_by != touch.operation && other.index != next.value_or(previous) &&
          (options_.reshard_after_forward || (in_backward_ && !comes_later(other.index))))
        release(other);
  if (!bucket.memory.defined()) gather(bucket);
  await(bucket);
  if (next && !buckets_[*next].memory.defined()) gather(buckets_[*next]);
}

bool Weights::comes_later(size_t bucket) const {
  if (visits_.size() > last_visits_.size()) return true;  // not known
  return std::find(last_visits_.begin() + int64_t(visits_.size()), last_visits_.end(), bucket) !=
         last_visits_.end();
}

std::optional<size_t> Weights::foresee() {
  const size_t now = visits_.size() - 1;
  if (now < last_visits_.size() && last_visits_[now] == visits_[now]) {
    if (now + 1 < last_visits_.size()) return last_visits_[now + 1];
    return std::nullopt;
  }
  // A new pass without an end to the last one, which had no backward.
  if (now > 0 && !last_visits_.empty() && last_visits_[0] == visits_[now]) {
    visits_ = {visits_[now]};
    events_ = {events_.back()};
    return foresee();
  }
  return std::nullopt;
}

void Weights::begin_backward() {
  in_backward_ = true;
  note({Event::What::Backward});
}

void Weights::note_reduce(size_t bucket) { note({Event::What::Reduce, bucket}); }

void Weights::note(const Event& event) {
  if (options_.zero < 3) return;
  events_.push_back(event);
  trail_ = (trail_ ^ (uint64_t(event.what) << 32 | (event.bucket + 1))) * 0x100000001b3;  // FNV
}

uint64_t Weights::take_trail() { return std::exchange(trail_, 0) & ((uint64_t{1} << 40) - 1); }

void Weights::abandon() {
  in_backward_ = false;
  if (options_.zero < 3) return;
  failure_ = nullptr;
  for (auto& bucket : buckets_) {
    bucket.gathering = {};
    bucket.pending = false;
    if (bucket.memory.defined()) pool_.push_back(bucket.memory);
    bucket.memory.reset();
    move_memory(bucket.params, nullptr);
  }
  // Of all blocks the one that is always there stays.
  const at::Tensor kept =
      *std::ranges::max_element(pool_, {}, [](const auto& b) { return b.numel(); });
  pool_ = {kept};
  num_allocated_ = kept.numel();
  visits_.clear();
  events_.clear();
  keep_all_ = false;
}

void Weights::end_backward() {
  in_backward_ = false;
  last_visits_ = visits_;
  last_events_ = events_;
  if (!keep_all_ && !options_.by_hand) release_all();
}

void Weights::follow(const std::function<void(size_t)>& reduce) {
  if (last_events_.empty())
    fail(Kind::Usage, "rank ", comm_.rank(),
         " has no data in the first step, and does not yet know what the others communicate; give "
         "every rank at least one sample in the first step");
  if (!keep_all_) release_all();
  const auto script = last_events_;
  for (const auto& [what, bucket, touch] : script) {
    if (what == Event::What::Visit) visit(buckets_[bucket], touch);
    if (what == Event::What::Backward) begin_backward();
    if (what == Event::What::Reduce) reduce(bucket);
  }
  end_backward();
}

void Weights::check() const {
  if (failure_) std::rethrow_exception(failure_);
  for (const auto& bucket : buckets_)
    for (const auto& slot : layout_->buckets[bucket.index].slots)
      for (const auto& leaf : parameters_[size_t(slot.parameter)].leaves)
        if (owner_of(leaf) != &bucket || leaf.storage_offset() != slot.offset ||
            leaf.numel() != slot.count)
          fail(Kind::Usage, "parameter '", parameters_[size_t(slot.parameter)].name,
               "' has left its buffer: it was moved, converted or replaced (Module::to, set_data) "
               "after data parallelism had taken it; do that before");
}

}  // namespace yoke::parallel
