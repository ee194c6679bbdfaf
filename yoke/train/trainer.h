// SPDX-License-Identifier: Apache-2.0
// Trains a model under a plan: steps, checkpoints, resuming. What a step sees and does depends on
// its number alone, so a run that goes on from a checkpoint is the run that was never stopped.
//
//   Trainer trainer(model, dataset, {.plan = plan, .steps = 100, .batch = 32});
//   trainer.callbacks.on_step = [](const Step& step) { std::cout << step.loss << "\n"; };
//   run_ranks(plan.num_ranks(), [&](Communicator& world) { trainer.fit(world); });
//
// Collective: fit(), by every rank of the world, each on its own thread. Callbacks are rank 0's.
// On a GPU a step is told of when the next one has been given to it, and a signal is seen one
// later.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>

#include "yoke/base/clock.h"
#include "yoke/comm/communicator.h"
#include "yoke/data/dataset.h"
#include "yoke/models/model.h"
#include "yoke/observe/trace.h"
#include "yoke/parallel/data_parallel.h"
#include "yoke/parallel/lr_schedule.h"
#include "yoke/plan/plan.h"

namespace yoke::comm {
class StopSignal;
}

namespace yoke::train {

struct TrainerOptions {
  plan::Plan plan = {};
  int64_t steps = 100;
  int64_t batch = 8;  // samples of a step: dp x micro_batches x those of one pass
  parallel::LrSchedule lr = {};
  std::string optimizer = "adamw";  // adamw, sgd, lion
  double weight_decay = 0.1;
  double clip = 1;  // the largest gradient norm; 0: any
  parallel::Precision precision = parallel::Precision::AsIs;
  uint64_t seed = 1;
  bool shuffle = true;

  std::filesystem::path checkpoints = {};  // empty: none are saved
  int64_t save_every = 0;                  // steps; 0: at the end alone
  int64_t keep = 2;
  bool async = true;
  bool resume = false;                             // from the newest, if there is one
  std::map<std::string, std::string> values = {};  // saved as well, such as the config
  Duration timeout = std::chrono::seconds(300);    // of a save
  // A gradient that is not finite updates nothing. Stop: it is an error. Skip: the next batch
  // comes. Rollback: to the newest checkpoint, and on with the next batch. Likewise after a loss
  // that is more than `spike` standard deviations above the last ones, which otherwise is told
  // alone.
  enum class OnNan { Stop, Skip, Rollback } on_nan = OnNan::Stop;
  double spike = 0;  // 0: never
  // Evaluates this many steps apart on the last part of the samples; 0: never.
  int64_t eval_every = 0;
  double val_fraction = 0;
  // A timeline of steps trace_first to trace_last: what the ranks compute, wait for and read.
  observe::Tracer* tracer = nullptr;
  int64_t trace_first = 0, trace_last = 0;
  int workers = 1;                         // threads of a rank that read ahead; 0: none
  const comm::StopSignal* stop = nullptr;  // save and leave at the next step
  double peak_flops = 0;                   // of a rank's device, for Step::mfu; 0: not known
};

struct Step {
  int64_t step = 0;  // the first is 1
  double loss = 0;   // the mean over the samples, or tokens, of the step
  double grad_norm = 0, lr = 0;
  double seconds = 0;
  double tokens_per_s = 0;
  double mfu = 0;            // the part of peak_flops that the model's arithmetic took
  int64_t memory_bytes = 0;  // of this process, or of the rank's GPU
};

struct Evaluated {
  double loss = 0;
  double accuracy = -1;  // the part that was guessed right; below 0: the model does not guess
};

class Trainer {
 public:
  Trainer(models::Model model, std::shared_ptr<data::Dataset> dataset, TrainerOptions options);

  struct Callbacks {
    std::function<void(int64_t step)> on_begin = nullptr;  // the steps that were done before
    std::function<void(const Step& step)> on_step = nullptr;
    // A checkpoint was handed over, and how long that held up the ranks; or why the last one
    // failed.
    std::function<void(int64_t step, Duration held_up)> on_save = nullptr;
    std::function<void(const std::string& why)> on_save_failed = nullptr;
    std::function<void(const std::string& what)> on_trouble = nullptr;  // what on_nan was about
    std::function<void(int64_t step, const Evaluated& result)> on_eval = nullptr;
    // The last of the traced steps is done, and where the first began. Once in every process.
    std::function<void(Time since)> on_traced = nullptr;
  };
  Callbacks callbacks = {};

  // The number of the signal that ended it early; 0: it is done.
  int fit(const comm::Communicator& world);
  const TrainerOptions& options() const { return options_; }

 private:
  const models::Model model_;
  std::shared_ptr<data::Dataset> dataset_, validation_;
  TrainerOptions options_;
  std::atomic<Time> trace_since_{Time::max()};
  std::atomic<bool> traced_{false};
};

}  // namespace yoke::train
