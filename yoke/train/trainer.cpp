// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/trainer.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/stop_signal.h"
#include "yoke/data/sampler.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/parallel/parallelize.h"
#include "yoke/train/state.h"

namespace yoke::train {
namespace {

using parallel::Pipeline;

std::unique_ptr<parallel::Optimizer> make_optimizer(const TrainerOptions& options,
                                                    parallel::DataParallel& dp) {
  parallel::OptimizerOptions common{.lr = options.lr.at(0), .weight_decay = options.weight_decay};
  if (options.clip > 0) common.clip = options.clip;
  if (options.optimizer == "adamw")
    return std::make_unique<parallel::AdamW>(dp, parallel::AdamWOptions{common, 0.9, 0.95});
  if (options.optimizer == "sgd")
    return std::make_unique<parallel::Sgd>(dp, parallel::SgdOptions{common, 0.9});
  if (options.optimizer == "lion")
    return std::make_unique<parallel::Lion>(dp, parallel::LionOptions{common});
  fail(Kind::Config, "train.optimizer is adamw, sgd or lion, got '", options.optimizer, "'");
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * int64_t(::sysconf(_SC_PAGESIZE));
}

// One rank's part of a run.
class Run {
 public:
  Run(const models::Model& model, const data::Dataset& dataset, const TrainerOptions& options,
      const Trainer::Callbacks& callbacks, const comm::Communicator& world)
      : model_(model),
        dataset_(dataset),
        options_(options),
        callbacks_(callbacks),
        world_(world),
        sampler_(dataset.size(), options.shuffle, options.seed),
        pipeline_(parallel::parallelize(model.layers, options.plan, world,
                                        {.precision = options.precision})),
        optimizer_(make_optimizer(options, pipeline_->data())),
        axis_{pipeline_->mesh().tp, options.plan.sequence},
        micro_batch_(options.batch / options.plan.dp / options.plan.micro_batches) {
    if (!options.checkpoints.empty())
      saver_ = std::make_unique<checkpoint::Saver>(
          options.checkpoints, world,
          checkpoint::SaverOptions{options.keep, options.async, options.timeout});
    if (options.resume) resume();
  }

  int go() {
    if (callbacks_.on_begin && world_.rank() == 0) callbacks_.on_begin(done_);
    int signal = 0;
    while (done_ < options_.steps && signal == 0) {
      train_step();
      if (options_.stop != nullptr) signal = options_.stop->agreed(world_);
      const bool regular = options_.save_every > 0 && done_ % options_.save_every == 0;
      if (saver_ && (regular || signal != 0 || done_ == options_.steps)) save();
    }
    if (saver_ && !wait_for_save() && world_.rank() == 0 && failure_)
      fail(Kind::Io, *failure_, "; the one before is as it was");
    pipeline_->data().finish();
    return signal;
  }

 private:
  void resume() {
    const auto path = checkpoint::latest(options_.checkpoints);
    if (!path) return;
    const checkpoint::Saved saved(*path);
    load_state(*pipeline_, *optimizer_, saved);
    done_ = saved.step();
    position_ = parse_int(saved.value("samples")).value_or(0);
  }

  // This replica's samples of a micro-batch.
  data::Batch batch(int micro) const {
    const int64_t first =
        position_ +
        (pipeline_->mesh().dp.rank() * options_.plan.micro_batches + micro) * micro_batch_;
    std::vector<int64_t> samples;
    for (int64_t i = 0; i < micro_batch_; ++i) samples.push_back(sampler_.at(first + i));
    auto result = dataset_.batch(samples);
    result.input = result.input.to(pipeline_->device());
    result.target = result.target.to(pipeline_->device());
    return result;
  }

  void train_step() {
    const SteadyClock clock;
    const Time start = clock.now();
    const double lr = options_.lr.at(done_);
    optimizer_->set_lr(lr);
    const auto loss =
        pipeline_->run({.input = [&](int micro) { return batch(micro).input; },
                        .loss =
                            [&](const at::Tensor& output, int micro) {
                              const at::Tensor target = batch(micro).target;
                              return Pipeline::Loss{model_.loss_sum(output, target, axis_),
                                                    double(target.size(0) * model_.tokens)};
                            }});
    const auto info = optimizer_->step();
    ++done_;
    position_ += options_.batch;
    const at::Tensor sums = at::zeros({2}, at::device(pipeline_->device()).dtype(at::kDouble));
    if (loss.sum.defined() && axis_.rank() == 0) {
      sums[0].copy_(loss.sum.reshape({}));
      sums[1].fill_(loss.count);
    }
    world_.all_reduce(sums).wait();
    if (world_.rank() != 0 || !callbacks_.on_step) return;
    const double seconds = std::chrono::duration<double>(clock.now() - start).count();
    callbacks_.on_step({.step = done_,
                        .loss = sums[0].item<double>() / sums[1].item<double>(),
                        .grad_norm = info.grad_norm(),
                        .lr = lr,
                        .seconds = seconds,
                        .tokens_per_s = double(options_.batch * model_.tokens) / seconds,
                        .memory_bytes = resident_bytes()});
  }

  void save() {
    wait_for_save();
    auto values = options_.values;
    values["samples"] = cat(position_);
    save_state(*pipeline_, *optimizer_, done_, std::move(values), *saver_);
    if (callbacks_.on_save && world_.rank() == 0) callbacks_.on_save(done_, saver_->held_up());
  }

  // Whether the last one is there. A checkpoint that failed does not end the run: the next may be.
  bool wait_for_save() {
    failure_ = saver_->wait();
    if (failure_ && callbacks_.on_save_failed && world_.rank() == 0)
      callbacks_.on_save_failed(*failure_);
    return !failure_;
  }

  const models::Model& model_;
  const data::Dataset& dataset_;
  const TrainerOptions& options_;
  const Trainer::Callbacks& callbacks_;
  const comm::Communicator world_;
  const data::Sampler sampler_;
  const std::unique_ptr<Pipeline> pipeline_;
  const std::unique_ptr<parallel::Optimizer> optimizer_;
  const parallel::TensorAxis axis_;
  const int64_t micro_batch_;
  std::unique_ptr<checkpoint::Saver> saver_;
  std::optional<std::string> failure_;
  int64_t done_ = 0;      // steps
  int64_t position_ = 0;  // samples
};

}  // namespace

Trainer::Trainer(models::Model model, std::shared_ptr<data::Dataset> dataset,
                 TrainerOptions options)
    : model_(std::move(model)), dataset_(std::move(dataset)), options_([&] {
        if (options.plan.ties.empty()) options.plan.ties = model_.ties;
        return std::move(options);
      }()) {
  const int64_t pass = int64_t(options_.plan.dp) * options_.plan.micro_batches;
  if (options_.steps < 1 || options_.batch < 1 || options_.batch % pass != 0)
    fail(Kind::Config,
         "a run wants 1 step or more, and a batch that dp x micro_batches = ", options_.plan.dp,
         " x ", options_.plan.micro_batches, " divides; got ", options_.steps, " steps of ",
         options_.batch);
  options_.lr.check();
}

int Trainer::fit(const comm::Communicator& world) {
  return Run(model_, *dataset_, options_, callbacks, world).go();
}

}  // namespace yoke::train
