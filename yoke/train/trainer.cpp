// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/trainer.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/stop_signal.h"
#include "yoke/comm/traced.h"
#include "yoke/data/loader.h"
#include "yoke/data/sampler.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/parallel/parallelize.h"
#include "yoke/parallel/readback.h"
#include "yoke/train/spike_guard.h"
#include "yoke/train/state.h"

namespace yoke::train {
namespace {

using parallel::Pipeline;
using OnNan = TrainerOptions::OnNan;

constexpr int64_t kMostEvaluated = 16;  // batches
constexpr int kMostTrouble = 10;

std::unique_ptr<parallel::Optimizer> make_optimizer(const TrainerOptions& options,
                                                    parallel::DataParallel& dp) {
  parallel::OptimizerOptions common{.lr = options.lr.at(0), .weight_decay = options.weight_decay};
  if (options.clip > 0) common.clip = options.clip;
  common.skip_bad = options.on_nan != OnNan::Stop;
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

// The most that has been in use; of a GPU what LibTorch has had for the ranks of this process.
int64_t memory_bytes(at::Device device) {
  if (device.is_cpu()) return resident_bytes();
  using c10::CachingAllocator::StatType;
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[size_t(StatType::AGGREGATE)].peak;
}

// How long a step takes where it is done: a GPU may come to it long after the host.
class Stopwatch {
 public:
  Stopwatch() = default;
  explicit Stopwatch(at::Device device) : device_(device), start_(SteadyClock().now()) {
    if (!device.is_cpu()) begin_ = mark();
  }
  void stop() {
    if (begin_) end_ = mark();
  }
  double seconds() const {  // waits for the end
    if (!begin_) return std::chrono::duration<double>(SteadyClock().now() - start_).count();
    end_->synchronize();
    return begin_->elapsedTime(*end_) / 1e3;
  }

 private:
  std::shared_ptr<c10::Event> mark() const {
    auto event = std::make_shared<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return event;
  }
  at::Device device_ = at::kCPU;
  Time start_ = {};
  std::shared_ptr<c10::Event> begin_, end_;
};

// Where a pass gets its samples from.
struct Source {
  const data::Dataset* dataset = nullptr;
  const data::Sampler* sampler = nullptr;  // null: in their order
  int64_t position = 0;
};

// One rank's part of a run.
class Run {
 public:
  Run(const models::Model& model, const data::Dataset& dataset, const data::Dataset* validation,
      const TrainerOptions& options, const Trainer::Callbacks& callbacks,
      const comm::Communicator& given, std::atomic<Time>& trace_since, std::atomic<bool>& traced)
      : model_(model),
        dataset_(dataset),
        validation_(validation),
        options_(options),
        callbacks_(callbacks),
        world_(options.tracer ? comm::traced(given, *options.tracer) : given),
        trace_since_(trace_since),
        traced_(traced),
        sampler_(dataset.size(), options.shuffle, options.seed),
        pipeline_(parallel::parallelize(model.layers, options.plan, world_,
                                        {.precision = options.precision, .device = model.device})),
        optimizer_(make_optimizer(options, pipeline_->data())),
        axis_{pipeline_->mesh().tp, options.plan.sequence},
        guard_(options.spike),
        is_late_(!pipeline_->device().is_cpu() && options.on_nan != OnNan::Rollback) {
    if (!pipeline_->device().is_cpu()) warm_up();
    if (!options.checkpoints.empty())
      saver_ = std::make_unique<checkpoint::Saver>(
          options.checkpoints, given,
          checkpoint::SaverOptions{options.keep, options.async, options.timeout});
    if (options.resume) load_newest();
    read_ahead();
    if (options.tracer) options.tracer->name_thread(world_.rank(), "train");
  }

  int go() {
    if (callbacks_.on_begin && world_.rank() == 0) callbacks_.on_begin(done_);
    int signal = 0;
    while (done_ < options_.steps && signal == 0) {
      if (options_.tracer && done_ + 1 == options_.trace_first) begin_trace();
      train_step();
      const bool traced = options_.tracer && done_ == options_.trace_last;
      const bool evaluates = validation_ != nullptr && done_ % options_.eval_every == 0;
      const bool regular = options_.save_every > 0 && done_ % options_.save_every == 0;
      const bool last = done_ == options_.steps;
      if (traced || evaluates || regular || last || is_asked_) report_last();
      if (traced) end_trace();
      if (evaluates) evaluate();
      if (is_asked_) signal = options_.stop->agreed(world_);
      if (saver_ && (regular || signal != 0 || last) && done_ != loaded_) save();
    }
    if (saver_)
      if (const auto failure = saver_->wait(); failure && world_.rank() == 0)
        fail(Kind::Io, *failure, "; the one before is as it was");
    pipeline_->data().finish();
    return signal;
  }

 private:
  // Which one that is rank 0 says: others may see the folder later, or another one.
  bool load_newest() {
    int64_t newest = -1;
    if (const auto path = checkpoint::latest(options_.checkpoints); path && world_.rank() == 0)
      newest = checkpoint::Saved(*path).step();
    const at::Tensor step = at::full({1}, newest, at::kLong).to(pipeline_->device());
    world_.broadcast(step, 0).wait();
    newest = step.item<int64_t>();
    if (newest < 0) return false;
    const checkpoint::Saved saved(options_.checkpoints / checkpoint::step_name(newest));
    load_state(*pipeline_, *optimizer_, saved);
    done_ = loaded_ = saved.step();
    position_ = parse_int(saved.value("samples")).value_or(0);
    if (saved.values().contains("losses")) guard_.restore(saved.value("losses"));
    return true;
  }

  // To the newest checkpoint, but not to its place in the data.
  void roll_back() {
    const int64_t position = position_;
    if (saver_) wait_for_save();
    if (!saver_ || !load_newest())
      fail(Kind::Internal, "there is no checkpoint to go back to in '",
           options_.checkpoints.string(), "'; say checkpoint.every=STEPS");
    position_ = position;
    if (done_ == rolled_to_ && ++num_rollbacks_ >= kMostTrouble)
      fail(Kind::Internal, "back at step ", done_, " for the ", num_rollbacks_,
           "th time: lower train.lr, or look at what is before it");
    if (done_ != rolled_to_) num_rollbacks_ = 1;
    rolled_to_ = done_;
    tell(cat("back to step ", done_, ", with the samples after these"));
  }

  void tell(const std::string& what) const {
    if (callbacks_.on_trouble && world_.rank() == 0) callbacks_.on_trouble(what);
  }

  int64_t samples_of_pass() const {
    return options_.batch / options_.plan.dp / options_.plan.micro_batches;
  }

  // This replica's samples of a micro-batch, on the host.
  data::Batch load(const Source& source, int micro) const {
    const int64_t each = samples_of_pass();
    const int64_t place = pipeline_->mesh().dp.rank() * options_.plan.micro_batches + micro;
    std::vector<int64_t> samples, positions;
    for (int64_t i = source.position + place * each; int64_t(samples.size()) < each; ++i) {
      samples.push_back(source.sampler ? source.sampler->at(i) : i);
      positions.push_back(i);
    }
    return source.sampler ? source.dataset->draw(samples, positions)
                          : source.dataset->batch(samples);
  }

  data::Batch read(const Source& source, int micro) {
    const observe::Span span(options_.tracer, "data", observe::Category::Data);
    const int64_t number =
        (source.position - offset_) / options_.batch * options_.plan.micro_batches + micro;
    auto batch = source.sampler && loader_ ? loader_->take(number) : load(source, micro);
    batch.input = to_device(batch.input);
    batch.target = to_device(batch.target);
    if (batch.documents.defined()) batch.documents = to_device(batch.documents);
    return batch;
  }

  void read_ahead() {
    offset_ = position_ % options_.batch;  // of another batch size before
    if (options_.workers == 0) return;
    const int64_t passes = options_.plan.micro_batches;
    loader_ = std::make_unique<data::Loader>(
        [this, passes](int64_t number) {
          return load({&dataset_, &sampler_, offset_ + number / passes * options_.batch},
                      int(number % passes));
        },
        options_.workers, std::max<int64_t>(2, options_.workers), options_.timeout);
  }

  // The host goes on while the copy waits for its turn; only from pinned memory it can.
  at::Tensor to_device(const at::Tensor& host) const {
    if (!host.is_cpu() || pipeline_->device().is_cpu()) return host.to(pipeline_->device());
    return host.pin_memory().to(pipeline_->device(), /*non_blocking=*/true);
  }

  // Pinned memory is kept once it is made. To make it waits for the GPU, where later a rank that
  // shares it may be waiting for this one.
  void warm_up() const {
    const auto batch = dataset_.batch(std::vector<int64_t>(size_t(samples_of_pass()), 0));
    if (!batch.input.is_cpu()) return;
    std::vector<at::Tensor> kept;
    std::vector<parallel::Readback> numbers;
    for (int i = 0; i < 2 * options_.plan.micro_batches + 2; ++i) {
      kept.push_back(batch.input.pin_memory());
      kept.push_back(batch.target.pin_memory());
      if (batch.documents.defined()) kept.push_back(batch.documents.pin_memory());
      numbers.emplace_back(
          at::zeros({NumSums}, at::device(pipeline_->device()).dtype(at::kDouble)));
    }
    world_.barrier();
  }

  // `right` counts what is guessed right, where it is given.
  Pipeline::Batch batch_of(const Source& source, at::Tensor right = {}) {
    // Whatever asks, and how often: it is read once.
    const auto batches = std::make_shared<std::map<int, data::Batch>>();
    const auto get = [=, this](int micro) -> const data::Batch& {
      const auto found = batches->find(micro);
      return found != batches->end() ? found->second : (*batches)[micro] = read(source, micro);
    };
    Pipeline::Batch batch;
    batch.input = [=](int micro) { return get(micro).input; };
    batch.loss = [=, this](const at::Tensor& output, int micro) {
      const auto& now = get(micro);
      if (right.defined()) right.add_(model_.num_right(output, now.target));
      return Pipeline::Loss{model_.loss_sum(output, now.target, axis_),
                            double(now.target.size(0) * model_.tokens - now.num_ignored)};
    };
    if (source.dataset->has_documents() || model_.wants_target)
      batch.passing = [=](int micro) {
        return parallel::Passing{.documents = get(micro).documents, .target = get(micro).target};
      };
    return batch;
  }

  // Loss, count and whether somebody was told to stop: over all ranks, on each of them.
  enum : int64_t { Loss, Count, Asked, Right, NumSums };
  at::Tensor sums_of(const Pipeline::Loss& loss, const at::Tensor& right = {}) const {
    const at::Tensor sums =
        at::zeros({NumSums}, at::device(pipeline_->device()).dtype(at::kDouble));
    if (loss.sum.defined() && axis_.rank() == 0) {
      sums[Loss].copy_(loss.sum.reshape({}));
      sums[Count].fill_(loss.count);
      if (right.defined()) sums[Right].copy_(right);
    }
    if (options_.stop != nullptr && options_.stop->pending() != 0) sums[Asked].fill_(1);
    world_.all_reduce(sums).wait();
    return sums;
  }

  // Norms over a rank's own samples have learned other numbers on each: one rank's count.
  void share_buffers() {
    const auto& dp = pipeline_->mesh().dp;
    if (dp.size() == 1) return;
    for (const auto& unit : pipeline_->data().units())
      for (const auto& buffer : unit->buffers()) dp.broadcast(buffer, 0).wait();
  }

  void evaluate() {
    share_buffers();
    const int64_t batches = std::min(kMostEvaluated, validation_->size() / options_.batch);
    double sum = 0, count = 0, right = 0;
    for (int64_t i = 0; i < batches; ++i) {
      const at::Tensor guessed =
          model_.num_right ? at::zeros({}, at::device(pipeline_->device()).dtype(at::kDouble))
                           : at::Tensor();
      const Source source{validation_, nullptr, i * options_.batch};
      const parallel::Readback sums(
          sums_of(pipeline_->evaluate(batch_of(source, guessed)), guessed));
      sum += sums[Loss];
      count += sums[Count];
      right += sums[Right];
    }
    if (callbacks_.on_eval && world_.rank() == 0)
      callbacks_.on_eval(done_,
                         {.loss = sum / count,
                          .accuracy = model_.num_right && !std::isnan(right) ? right / count : -1});
  }

  void begin_trace() {
    const Time now = options_.tracer->now();
    for (Time first = trace_since_;
         now < first && !trace_since_.compare_exchange_weak(first, now);) {
    }
  }

  void end_trace() {
    world_.barrier();
    if (callbacks_.on_traced && !traced_.exchange(true)) callbacks_.on_traced(trace_since_);
  }

  // What the pipeline has done, as spans.
  void trace_actions(Time start) const {
    for (const auto& [action, begin, end] : pipeline_->times()) {
      const bool computes = action.act == plan::Act::F || action.act == plan::Act::B ||
                            action.act == plan::Act::I || action.act == plan::Act::W ||
                            action.act == plan::Act::Recompute;
      const auto at = [&](double seconds) { return start + Duration(int64_t(seconds * 1e9)); };
      if (computes)
        options_.tracer->record(options_.tracer->intern(plan::to_text(action)),
                                observe::Category::Compute, at(begin), at(end));
    }
  }

  // A step that was given to the device, and what it says of it.
  struct Issued {
    Step step = {};
    parallel::StepInfo info = {};
    parallel::Readback sums = {};
    Stopwatch watch = {};
  };

  // A GPU is given a step before it has done the one before: so it does not wait for the host.
  void train_step() {
    Issued now{.step = {.step = done_ + 1, .lr = options_.lr.at(done_)},
               .watch = Stopwatch(pipeline_->device())};
    const Time start = SteadyClock().now();
    optimizer_->set_lr(now.step.lr);
    const auto loss = pipeline_->run(batch_of({&dataset_, &sampler_, position_}));
    if (options_.tracer) trace_actions(start);
    report_last();  // now: if it was bad, the optimizer ends the run
    {
      const observe::Span span(options_.tracer, "optimizer");
      now.info = optimizer_->step();
    }
    now.sums = parallel::Readback(sums_of(loss));
    now.watch.stop();
    ++done_;
    position_ += options_.batch;
    last_ = std::move(now);
    if (!is_late_) report_last();
  }

  void report_last() {
    if (!last_) return;
    const Issued last = *std::exchange(last_, std::nullopt);
    Step step = last.step;
    step.loss = last.sums[Loss] / last.sums[Count];
    step.grad_norm = last.info.grad_norm();
    is_asked_ = is_asked_ || last.sums[Asked] > 0;
    step.seconds = last.watch.seconds();
    step.tokens_per_s = double(options_.batch * model_.tokens) / step.seconds;
    if (options_.peak_flops > 0)
      step.mfu = step.tokens_per_s * model_.flops / (options_.peak_flops * world_.size());
    step.memory_bytes = memory_bytes(pipeline_->device());
    if (world_.rank() == 0 && callbacks_.on_step) callbacks_.on_step(step);
    if (in_trouble(step) && options_.on_nan == OnNan::Rollback) roll_back();
  }

  // The same on all ranks: so are the loss and the norm.
  bool in_trouble(const Step& step) {
    // In float16 it is part of finding the scale.
    const bool fp16 = options_.precision == parallel::Precision::Fp16;
    if (!std::isfinite(step.loss) || (!std::isfinite(step.grad_norm) && !fp16)) {
      if (++num_bad_ >= kMostTrouble)
        fail(
            Kind::Internal, "step ", step.step, " is the ", num_bad_,
            "th in a row whose loss or gradient is no number; lower train.lr, or look at the data");
      tell(cat("step ", step.step, ": the loss is ", step.loss, " and the gradient norm ",
               step.grad_norm, "; nothing was updated"));
      return true;
    }
    num_bad_ = 0;
    const double score = guard_.see(step.loss);
    if (score == 0) return false;
    tell(cat("step ", step.step, ": the loss is ", step.loss, ", ", score,
             " standard deviations above the last ones"));
    return true;
  }

  void save() {
    wait_for_save();
    auto values = options_.values;
    values["samples"] = cat(position_);
    values["losses"] = guard_.text();
    save_state(*pipeline_, *optimizer_, done_, std::move(values), *saver_);
    if (callbacks_.on_save && world_.rank() == 0) callbacks_.on_save(done_, saver_->held_up());
  }

  // Why the last one is not there. That does not end the run: the next may be.
  std::optional<std::string> wait_for_save() {
    const auto failure = saver_->wait();
    if (failure && callbacks_.on_save_failed && world_.rank() == 0)
      callbacks_.on_save_failed(*failure);
    return failure;
  }

  const models::Model& model_;
  const data::Dataset& dataset_;
  const data::Dataset* const validation_;  // may be null
  const TrainerOptions& options_;
  const Trainer::Callbacks& callbacks_;
  const comm::Communicator world_;
  std::atomic<Time>& trace_since_;
  std::atomic<bool>& traced_;
  const data::Sampler sampler_;
  const std::unique_ptr<Pipeline> pipeline_;
  const std::unique_ptr<parallel::Optimizer> optimizer_;
  const parallel::TensorAxis axis_;
  SpikeGuard guard_;
  const bool is_late_;          // a step is reported when the next one is issued
  std::optional<Issued> last_;  // not reported yet
  bool is_asked_ = false;       // to stop
  std::unique_ptr<checkpoint::Saver> saver_;
  std::unique_ptr<data::Loader> loader_;
  int64_t loaded_ = -1, rolled_to_ = -1;  // steps
  int num_rollbacks_ = 0, num_bad_ = 0;   // to that step; in a row
  int64_t done_ = 0;                      // steps
  int64_t position_ = 0, offset_ = 0;     // samples
};

}  // namespace

Trainer::Trainer(models::Model model, std::shared_ptr<data::Dataset> dataset,
                 TrainerOptions options)
    : model_(std::move(model)), dataset_(std::move(dataset)), options_(std::move(options)) {
  if (options_.plan.ties.empty()) options_.plan.ties = model_.ties;
  const int64_t passes = int64_t(options_.plan.dp) * options_.plan.micro_batches;
  if (options_.steps < 1 || options_.batch < 1 || options_.batch % passes != 0)
    fail(Kind::Config,
         "a run wants 1 step or more, and a batch that dp x micro_batches = ", options_.plan.dp,
         " x ", options_.plan.micro_batches, " divides; got ", options_.steps, " steps of ",
         options_.batch);
  options_.lr.check();
  if (options_.eval_every <= 0) return;
  const int64_t size = dataset_->size(), kept = int64_t(double(size) * options_.val_fraction);
  if (kept < options_.batch || kept >= size)
    fail(Kind::Config, "to evaluate, data.val_fraction x samples = ", options_.val_fraction, " x ",
         size, " = ", kept, " must be a batch, ", options_.batch,
         ", at least, and leave some to train on");
  validation_ = data::part_of(dataset_, size - kept, size);
  dataset_ = data::part_of(dataset_, 0, size - kept);
}

int Trainer::fit(const comm::Communicator& world) {
  return Run(model_, *dataset_, validation_.get(), options_, callbacks, world, trace_since_,
             traced_)
      .go();
}

}  // namespace yoke::train
