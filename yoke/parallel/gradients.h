// SPDX-License-Identifier: Apache-2.0
// The gradients of a model: collected in the buckets of the layout while a backward pass produces
// them, and reduced over the ranks bucket by bucket, in the same order everywhere, as soon as a
// bucket and all before it are full. Stages 0 and 1 keep every bucket and reduce once a step;
// stages 2 and 3 take buckets from a pool, reduce every pass and keep the sum of their shard.
// Collective: begin() and end() of every pass, on all ranks. Threads: the rank's, and its
// backward's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "yoke/comm/communicator.h"
#include "yoke/parallel/model.h"
#include "yoke/parallel/wire.h"

namespace yoke::parallel {

class Gradients {
 public:
  // Some of the buckets, one after the other.
  struct Range {
    size_t begin = 0, end = 0;
    bool has(size_t bucket) const { return begin <= bucket && bucket < end; }
  };
  struct Options {
    int zero = 0;
    size_t first_shared = SIZE_MAX;     // from this bucket on every pass may add to them
    at::ScalarType dtype = at::kFloat;  // of the sums
    at::Device device = at::kCPU;
    std::shared_ptr<const Wire> wire = plain_wire();
  };

  Gradients(std::shared_ptr<const plan::Layout> layout,
            const std::vector<ModelParameter>& parameters, const comm::Communicator& comm,
            Options options);
  ~Gradients();  // the hooks go; gradients that lie in the buckets stay with the parameters
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  // Around each backward pass. `reduce`: the gradients of a part of the model, which has the
  // buckets of the range to itself, are reduced while it runs, and `on_reduce` is told of each
  // bucket; else they are only added up, and a later pass reduces them.
  void begin(bool reduce, Range range, std::function<void(size_t)> on_reduce = nullptr);
  void end();
  // In a pass: a gradient that autograd does not bring. `last`: in this pass no more of it comes.
  void deliver(const at::Tensor& leaf, const at::Tensor& value, bool last);
  // Between the two: reduces the buckets up to this one, whatever they hold.
  void reduce_up_to(size_t bucket);
  // Adds up what this rank and those of the group have in the buckets so far. Before they are
  // reduced; every parameter counts as used.
  void sum_over(const comm::Communicator& group, Range range);
  // Takes over what another layout of the same parameters holds. Stages 0 and 1.
  void adopt(const Gradients& other);

  // The order in which the parameters of the last pass had their gradients.
  const std::vector<int>& order() const { return order_; }
  // Which parameters had a gradient in this step, on this rank.
  const std::vector<bool>& used() const { return used_; }

  // Collective. Waits for the reductions; then owned() holds the sums over all ranks and passes.
  void await();
  at::Tensor owned(size_t bucket) const;  // the shard; at stage 0 all of the bucket
  at::Tensor shard(size_t bucket) const;
  // Forgets the step's gradients.
  void clear();
  // The same in the middle of a pass that has failed.
  void abandon();
  int64_t bytes() const, pool_bytes() const;

 private:
  struct Bucket {
    at::Tensor block = {};  // of the pool, behind full
    at::Tensor full = {};   // [count]; at stages 2 and 3 only while a pass fills it
    at::Tensor shard = {};  // of full; at stages 2 and 3 memory of its own
    at::Tensor carry = {};  // what an earlier reduction of this step gave, at stages 0 and 1
    at::Tensor fresh = {};  // where a reduction writes that is to be added
    std::vector<at::Tensor> places = {}, values = {};  // on a GPU: to be copied in one go
    comm::Work work = {};
    int num_ready = 0;
    bool reduced = false;  // since it was last filled
    bool has_sum = false;  // the shard holds that of earlier passes, at stages 2 and 3
  };
  struct State {
    size_t bucket = 0;
    plan::Slot slot = {};
    at::Tensor place = {};         // shaped; changes with the bucket's memory at stages 2 and 3
    int num_arrived = 0;           // leaves, in this pass
    bool filled = false;           // the place holds gradients
    std::vector<bool> bound = {};  // by leaf: its gradient is the place
  };

  void hook(int parameter, size_t leaf);
  void absorb(int parameter, size_t leaf);
  void empty_places(size_t bucket);  // nothing has arrived yet
  void copy_values(size_t bucket);   // those that wait for it
  void provide(size_t bucket);       // memory for a bucket, from the pool
  void fill(size_t bucket);          // with zeros where nothing has arrived
  void take_in(size_t bucket);       // awaits its reduction and adds it up
  void settle(size_t bucket);        // the same, with what was kept apart
  void launch(size_t bucket);
  void clear_gaps(const plan::Bucket& plan, const at::Tensor& tensor) const;
  bool keeps_buckets() const { return options_.zero < 2; }

  const std::shared_ptr<const plan::Layout> layout_;
  const std::vector<ModelParameter> parameters_;
  const comm::Communicator comm_;
  const Options options_;
  std::vector<Bucket> buckets_;
  std::vector<State> states_;
  std::vector<bool> used_;
  std::vector<int> order_;
  std::unordered_map<const at::TensorImpl*, std::pair<int, size_t>> leaves_;
  std::vector<std::function<void()>> remove_hooks_;
  std::vector<at::Tensor> pool_;
  int64_t num_allocated_ = 0;  // elements, in the pool or taken from it
  std::vector<size_t> in_flight_;
  size_t next_ = 0;   // the bucket to be launched next
  Range range_ = {};  // of this pass
  bool active_ = false, reducing_ = false;
  std::function<void(size_t)> on_reduce_;
};

}  // namespace yoke::parallel
