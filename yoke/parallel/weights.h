// SPDX-License-Identifier: Apache-2.0
// The memory of a model's trainable parameters: one run for each bucket of the layout, of which the
// parameters are views. Under ZeRO 1 and 2 every rank updates its shard and the rest is gathered,
// awaited when an operation first touches it. Under ZeRO 3 only the shards stay; a bucket is
// gathered when it is touched, the one that came next in the last pass is fetched ahead, and what
// is neither is dropped.
// Collective: the ranks touch buckets in the same order. Threads: the rank's, and its backward's.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "yoke/comm/communicator.h"
#include "yoke/parallel/model.h"
#include "yoke/parallel/touch.h"

namespace yoke::parallel {

class Weights {
 public:
  struct Options {
    int zero = 0;
    at::ScalarType dtype = at::kFloat;  // that the model computes in
    at::Device device = at::kCPU;
    bool reshard_after_forward = true;
    bool by_hand = false;  // ZeRO 3: fetch() and drop() say when; a touch fetches what is missing
  };

  // `parameters`, in the order of the layout's, must outlive this; both may still grow.
  Weights(std::shared_ptr<const plan::Layout> layout, const std::vector<ModelParameter>& parameters,
          const comm::Communicator& comm, Options options);
  // Collective, once for each bucket of the layout. The leaves become views of it. The values, by
  // parameter, are rank 0's; where they have more bits than the model computes in, what is owned is
  // also kept with all of them: the masters.
  void add(size_t bucket, const std::vector<at::Tensor>& values);
  // After the last of them.
  void start();
  // The leaves keep their values where the rank has them all; under ZeRO 3 they become empty.
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // What this rank updates of a bucket: its shard, without ZeRO all of it. [elements]
  at::Tensor owned(size_t bucket) const;
  // The same as optimizers see it: the masters where there are any.
  at::Tensor masters(size_t bucket) const;
  // All of a bucket; under ZeRO 3 only while it is gathered.
  const at::Tensor& full(size_t bucket) const { return buckets_[bucket].params; }

  // Collective. After an update of the masters.
  void updated();
  // Collective. All of every bucket is there, until release_all().
  void gather_all();
  void release_all();

  // Collective, under ZeRO 3 by hand. A bucket is gathered, and awaited when it is touched; its
  // memory is free for others.
  void fetch(size_t bucket);
  void drop(size_t bucket);

  // Around a backward pass; and that a bucket's gradients were reduced in it.
  void begin_backward();
  void note_reduce(size_t bucket);
  void end_backward();
  // Collective. Under ZeRO 3 a rank without data takes part in what the last pass communicated;
  // `reduce` is called where a bucket's gradients were reduced.
  void follow(const std::function<void(size_t)>& reduce);

  // What this rank has communicated since the last call, in a number that is the same for the same
  // buckets in the same order; below 2^40.
  uint64_t take_trail();

  // Throws what went wrong in a touch, or Kind::Usage if a leaf is no longer where it was put.
  void check() const;
  // A pass has failed and is forgotten.
  void abandon();
  int64_t pool_bytes() const;

 private:
  struct Bucket final : Touchable {
    Weights* weights = nullptr;
    size_t index = 0;
    at::Tensor memory = {};  // behind params; undefined while nothing is gathered
    at::Tensor params = {};  // [count]
    at::Tensor shard = {};   // under ZeRO 3 memory of its own
    at::Tensor masters = {};
    comm::Work gathering = {};
    bool pending = false;    // gathering has not been awaited
    bool temporary = false;  // the memory is not of the pool
    uint64_t used_by = 0;    // the last operation
    void touched(Touch touch) noexcept override { weights->touched(*this, touch); }
  };
  struct Event {
    enum class What { Visit, Backward, Reduce } what;
    size_t bucket = 0;
    Touch touch = {};  // of a visit
  };

  at::Tensor view(const plan::Slot& slot, const Bucket& bucket) const;
  void touched(Bucket& bucket, Touch touch) noexcept;
  void visit(Bucket& bucket, Touch touch);
  void gather(Bucket& bucket);
  void await(Bucket& bucket);
  void release(Bucket& bucket);
  void lend(Bucket& bucket) noexcept;  // any memory at all
  void note(const Event& event);
  bool comes_later(size_t bucket) const;  // in this pass, if it goes as the last one
  std::optional<size_t> foresee();        // what comes after the visit that has just been noted

  const std::shared_ptr<const plan::Layout> layout_;
  const std::vector<ModelParameter>& parameters_;
  const comm::Communicator comm_;
  const Options options_;
  std::deque<Bucket> buckets_;
  std::vector<at::Tensor> pool_;  // memory of buckets that are not gathered
  int64_t num_allocated_ = 0;     // elements, pool and gathered
  std::unique_ptr<TouchObserver> observer_;
  std::vector<size_t> visits_, last_visits_;  // buckets in the order of this pass, and the last
  std::vector<Event> events_, last_events_;   // likewise, with what else happened
  bool adding_ = false;                       // our own touches do not count
  bool in_backward_ = false;
  bool keep_all_ = false;
  uint64_t trail_ = 0;
  std::exception_ptr failure_;
};

}  // namespace yoke::parallel
