// SPDX-License-Identifier: Apache-2.0
// Data parallelism for any module, as it is: every rank holds the model, or a shard of it, and sees
// its own part of the batch; the gradients are those of the whole batch.
//
//   DataParallel dp(*model, comm, {.zero = 1});
//   AdamW optimizer(dp, {.lr = 3e-4});
//   for (...) {
//     dp.backward(loss.sum(), samples);   // sum and number of this rank's samples, even unequal
//     optimizer.step();
//   }
//
// Collective: construction, backward(), accumulate(), gathered(), check_replicas(),
// Optimizer::step(): by every rank, in the same order. Under ZeRO 3 also forward: all ranks use the
// same parameters in the same order, each pass like the last; evaluate inside gathered(). Threads:
// the rank's own; the module is used on the thread that made this.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "yoke/comm/communicator.h"
#include "yoke/parallel/deferral.h"
#include "yoke/parallel/model.h"
#include "yoke/parallel/wire.h"
#include "yoke/plan/layout.h"

namespace yoke::parallel {

// What the model computes in. AsIs: what its parameters are. Bf16, Fp16: the parameters become so,
// with masters in their own type, and the rank's thread computes under autocast.
enum class Precision { AsIs, Bf16, Fp16 };

struct DataParallelOptions {
  // 0: replicas. 1: the optimizer's state is sharded. 2: gradients too. 3: parameters too.
  int zero = 0;
  Precision precision = Precision::AsIs;
  int64_t bucket_bytes = 25 << 20, first_bucket_bytes = 1 << 20;
  bool learn_order = true;            // stages 0 and 1: buckets in the order of the first backward
  bool reshard_after_forward = true;  // stage 3: what forward gathered is gathered again
  std::shared_ptr<const Wire> wire = plain_wire();
  int check_every = 0;        // steps from one comparison of the replicas to the next; 0: none
  double loss_scale = 65536;  // Fp16: the first
  // The ranks that have other parameters of the same model, with the same samples: the norm, the
  // counts and what is not finite are of all. Empty: nobody.
  comm::Communicator across = {};
  // Parameters that the ranks of a group have in common, in the same order, under one of the names.
  // They begin with the values of its first rank, which counts them in the norm.
  struct Shared {
    std::vector<std::string> names = {};
    comm::Communicator group = {};
    bool sum = true;    // each has a part of the gradient; false: all of it
    bool tied = false;  // all names are one parameter's, which has the first one on every rank
  };
  std::vector<Shared> shared = {};
  // Of a model in parts, at stage 3: unshard() and reshard() say when parameters are gathered; else
  // their first touch does.
  bool by_hand = false;
  // Of a rank without parameters, in a model in parts; else it is theirs.
  std::optional<at::Device> device = {};
};

// Fp16: what the loss is multiplied with, so that small gradients do not vanish.
struct LossScale {
  double value = 1;
  int num_good = 0;  // steps since it has changed
};

class DataParallel {
 public:
  DataParallel(torch::nn::Module& module, const comm::Communicator& comm,
               const DataParallelOptions& options = {});
  // Turns the graph optimiser of TorchScript off, which holds back the gradients.
  DataParallel(torch::jit::Module& module, const comm::Communicator& comm,
               const DataParallelOptions& options = {});
  // A model as a list of parts, each made when its turn comes and sharded before the next is: so
  // one that is larger than a rank's memory can exist. Each part is a bucket. Wants zero = 3. The
  // parts are in units(), in their order; calling them is the caller's.
  using UnitFactory = std::function<std::shared_ptr<torch::nn::Module>()>;
  DataParallel(const std::vector<UnitFactory>& units, const comm::Communicator& comm,
               const DataParallelOptions& options = {.zero = 3});
  // A model in parts whose backward passes are made one by one, by pass(); no bucket has parameters
  // of two. In the order in which their gradients are complete. The order is not learnt.
  using Parts = std::vector<std::shared_ptr<torch::nn::Module>>;
  DataParallel(Parts parts, const comm::Communicator& comm,
               const DataParallelOptions& options = {});
  ~DataParallel();
  const Parts& units() const;

  // Adds the gradient of `loss_sum` over `count` samples (or tokens), and reduces it over the ranks
  // while it is computed. A step divides the sum of all gradients by the sum of all counts. A rank
  // that has no samples gives an undefined tensor and 0. More losses of the same samples: count 0.
  void backward(const at::Tensor& loss_sum, double count);
  // The same for all but the last micro-batch of a step; stages 0 and 1 do not communicate.
  void accumulate(const at::Tensor& loss_sum, double count);

  // Of a model in parts: `fn` runs backward through one of them. Weight gradients that layers have
  // put off it gives to `deliver`. `reduce`: the part's gradients are complete, or, at stage 2 and
  // above, those of one more micro-batch.
  void pass(size_t part, bool reduce, const std::function<void(const Deliver& deliver)>& fn);
  // Collective, at stage 3: the parameters of a part are gathered, and dropped. What was not is
  // gathered when it is touched.
  void unshard(size_t part);
  void reshard(size_t part);
  // Forgets the passes of a step that has failed.
  void abandon_passes();
  // After the last of a step, with the number of this rank's samples.
  void end_passes(double count);
  bool awaits_step() const;  // backward() or end_passes() was, and the optimizer's step not yet

  // Runs `fn` while every rank has all parameters: to save, evaluate or look at them. What it
  // writes into them is lost at stages 1 and above.
  void gathered(const std::function<void()>& fn);
  // Compares the parameters of all ranks bit by bit; throws with the rank that differs.
  void check_replicas();
  // Throws if the last step went wrong, which the host of a GPU may not have heard of yet. For the
  // end of a run; gathered() and the next step ask as well.
  void finish();

  const comm::Communicator& comm() const;
  const plan::Layout& layout() const;
  const DataParallelOptions& options() const;
  plan::Memory memory() const;  // bytes of this rank, as allocated; optimizer: the masters alone
  // To be saved and set with the optimizer's state.
  const LossScale& loss_scale() const;
  void set_loss_scale(LossScale scale);

  // For optimizers. What this rank steps of each bucket: weights and gradients of equal length, and
  // the parameters in them.
  struct Part {
    at::Tensor weights = {}, gradients = {};  // [elements]
    at::Tensor shard = {};  // of the gradients: every element of the model is in one rank's
    std::vector<plan::Piece> pieces = {};
    bool counts = true;  // it is for this rank to count, and save, what others may have as well
  };
  // For checkpoints: without gradients. The weights may be written; restored() makes them the
  // model's, and is collective.
  std::vector<Part> parts() const;
  void restored();
  struct Reduced {
    std::vector<Part> parts = {};
    std::vector<bool> used = {};  // the parameters that had a gradient on some rank
    // Of all ranks, on the device: the host need not wait for them. float64, one element.
    at::Tensor count = {};
    at::Tensor squares = {};   // the sum over all gradients
    at::Tensor mismatch = {};  // bool: ranks have communicated other buckets (see above, ZeRO 3)
  };
  // Collective. `exact`: the sum of squares is the same bits however the gradients are sharded,
  // which takes a GPU longer.
  Reduced reduced(bool exact = true);
  // The step is over: the weights have been updated, or, where gradients were not finite, not.
  // `verdict` throws if something in it was wrong, which a device may yet have to find out; it is
  // asked before the next step and before anybody looks at the parameters.
  void stepped(bool updated, std::function<void()> verdict = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::parallel
