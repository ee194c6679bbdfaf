// SPDX-License-Identifier: Apache-2.0
// Optimizers on the flat memory of a DataParallel: one fused update for each group of parameters,
// over this rank's shard. step() divides the gradients by the global count, measures their norm
// (every parameter once), clips, updates, and clears. Parameters that had no gradient on any rank
// are left as they are. Gradients that are not finite update nothing and are an error: of this
// step where the gradients are on the CPU; on a GPU, for which the host does not wait (but for
// Lion), of the next one, of gathered() or of finish(). Collective: step(). Threads: the rank's.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "yoke/parallel/data_parallel.h"
#include "yoke/parallel/readback.h"

namespace yoke::parallel {

struct OptimizerOptions {
  double lr = 1e-3;
  double weight_decay = 0;
  // The parameters that decay: matrices, unless told otherwise.
  std::function<bool(const plan::Parameter&)> decays = [](const plan::Parameter& parameter) {
    return parameter.shape.size() >= 2;
  };
  // The largest gradient norm.
  double clip = std::numeric_limits<double>::infinity();
  bool skip_bad = false;  // gradients that are not finite are no error: nothing is updated
};

struct StepInfo {
  int64_t step = 0;  // the first is 1
  double lr = 0;
  // Nothing was updated. fp16: the scaled gradients did not fit, and the scale was lowered. On a
  // GPU with skip_bad, grad_norm() tells.
  bool skipped = false;
  Readback numbers = {};
  // These wait for the device.
  double grad_norm() const { return numbers[0]; }    // of the mean gradient, before clipping
  double count() const { return numbers[1]; }        // samples of all ranks
  bool mismatch() const { return numbers[2] != 0; }  // ZeRO 3: ranks have gathered other buckets
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  StepInfo step();

  double lr() const { return options_.lr; }
  void set_lr(double lr) { options_.lr = lr; }
  int64_t state_bytes() const;

  // For checkpoints. State of this rank for each bucket, by name ("exp_avg"); zeros before the
  // first step.
  using State = std::map<std::string, std::vector<at::Tensor>>;
  const State& state();
  // Steps so far, and of each parameter of the layout.
  int64_t num_steps() const { return step_; }
  const std::vector<int64_t>& parameter_steps();
  // The state was written into.
  void restored(int64_t num_steps, std::vector<int64_t> parameter_steps);

 protected:
  Optimizer(DataParallel& dp, OptimizerOptions options, std::vector<std::string> state_names);

  // What one fused call updates: parameters of equal decay. Lists of equal length.
  struct Batch {
    double weight_decay = 0;
    std::vector<at::Tensor> weights = {}, gradients = {}, steps = {};
    std::vector<std::vector<at::Tensor>> state = {};  // in the order of the names
  };
  struct Scaling {
    at::Tensor divisor = {};    // of the gradients, a float32 of one element; undefined: none
    at::Tensor found_inf = {};  // likewise; 1: nothing may change. Undefined: it is 0.
  };
  virtual void update(const Batch& batch, const Scaling& scaling) = 0;

  DataParallel& dp_;
  OptimizerOptions options_;

 private:
  void make_state(const std::vector<DataParallel::Part>& parts);
  void settle_steps();
  void plan_batches(const DataParallel::Reduced& reduced);

  const std::vector<std::string> state_names_;
  State state_;
  std::vector<Batch> batches_;
  std::vector<bool> used_;          // what batches_ was made for
  std::vector<int64_t> num_steps_;  // of each parameter
  at::Tensor num_bad_ = {};         // of those, as many as the GPU left out
  int64_t step_ = 0;
};

// Loshchilov and Hutter, ICLR 2019.
struct AdamWOptions : OptimizerOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};
class AdamW final : public Optimizer {
 public:
  explicit AdamW(DataParallel& dp, AdamWOptions options = {});

 private:
  void update(const Batch& batch, const Scaling& scaling) override;
  const double beta1_, beta2_, eps_;
};

struct SgdOptions : OptimizerOptions {
  double momentum = 0;
  bool nesterov = false;
};
class Sgd final : public Optimizer {
 public:
  explicit Sgd(DataParallel& dp, SgdOptions options = {});

 private:
  void update(const Batch& batch, const Scaling& scaling) override;
  const double momentum_;
  const bool nesterov_;
};

// Chen et al., NeurIPS 2023: the sign of an interpolated momentum.
struct LionOptions : OptimizerOptions {
  double beta1 = 0.9, beta2 = 0.99;
};
class Lion final : public Optimizer {
 public:
  explicit Lion(DataParallel& dp, LionOptions options = {});

 private:
  void update(const Batch& batch, const Scaling& scaling) override;
  const double beta1_, beta2_;
};

}  // namespace yoke::parallel
