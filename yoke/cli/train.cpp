// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/train.h"

#include <ATen/Context.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <iostream>

#include "yoke/base/text.h"
#include "yoke/checkpoint/saved.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/flight_watch.h"
#include "yoke/cli/run_folder.h"
#include "yoke/cli/supervise.h"
#include "yoke/cli/trace.h"
#include "yoke/comm/run_world.h"
#include "yoke/comm/stop_signal.h"
#include "yoke/observe/json_lines.h"
#include "yoke/observe/progress.h"
#include "yoke/train/resolve.h"
#include "yoke/train/trainer.h"

namespace yoke::cli {
namespace {

constexpr int kRequeue = 85;  // saved on SIGUSR1: start me again

struct Options {
  std::vector<std::string> words = {};  // the config, then section.key=value
  std::string devices = {};
  bool dry_run = false, resume = false, json = false, keys = false;
};

train::Config read_config(const Options& options) {
  auto words = options.words;
  std::string where = "the command line", text;
  if (!words.empty() && words[0].find('=') == std::string::npos) {
    where = words[0];
    words.erase(words.begin());
    std::ifstream file(where);
    if (!file) fail(Kind::Config, "cannot read '", where, "': ", std::strerror(errno));
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  auto config = train::parse_config(text, where, words);
  if (!options.devices.empty()) config.run.devices = options.devices;
  return config;
}

// Of this process. A launcher's process has one rank, on the GPU of its place on the host, unless
// it is told otherwise.
std::vector<topo::Device> devices_of(const train::Config& config, const topo::LaunchInfo& launch,
                                     const topo::Host& host) {
  auto devices = topo::parse_devices(config.run.devices, &host);
  const bool shared = launch.world_size > 1 && config.run.devices == "auto";
  if (shared && devices.size() > 1) devices = {devices[size_t(launch.local_rank) % devices.size()]};
  return devices;
}

std::string count_text(double count) {
  char text[32];
  std::snprintf(text, sizeof text,
                count >= 1e9   ? "%.2f G"
                : count >= 1e6 ? "%.2f M"
                               : "%.1f k",
                count / (count >= 1e9   ? 1e9
                         : count >= 1e6 ? 1e6
                                        : 1e3));
  return text;
}

// Bytes of a rank by formula, without activations: weights, gradients, the optimizer's moments.
double state_bytes(const train::Config& config, const plan::Plan& plan, double parameters) {
  const double mine = parameters / plan.pp / plan.tp, shard = mine / plan.dp;
  const bool few = config.train.precision != "fp32";
  const double moments = config.train.optimizer == "adamw" ? 8 : 4;
  return (plan.zero == 3 ? shard : mine) * (few ? 2 : 4) + (plan.zero >= 2 ? shard : mine) * 4 +
         (plan.zero >= 1 ? shard : mine) * (moments + (few ? 4 : 0));
}

// What is trained, and who has which part of it.
std::string header(const train::Config& config, const plan::Plan& plan, const train::Sizes& sizes,
                   const models::Model& model, const std::vector<topo::Device>& devices) {
  std::string text =
      cat(config.model.arch, ": ", count_text(double(model.num_parameters)), " parameters");
  if (config.model.arch != "torchscript")
    text += cat(", ", config.model.layers, " layers, dim ", config.model.dim);
  text += cat("\nplan: pp ", plan.pp, " x dp ", plan.dp, " x tp ", plan.tp, ", ZeRO ", plan.zero);
  if (plan.pp > 1) text += cat(", ", plan.schedule);
  text += cat("; a step has ", sizes.batch, " samples: ", plan.dp, " x ", plan.micro_batches,
              " passes of ", sizes.micro_batch);
  text += cat("\nmemory of a rank: ",
              bytes_text(uint64_t(state_bytes(config, plan, double(model.num_parameters)))),
              " of weights, gradients and optimizer\n");
  if (plan.num_ranks() == 1 || plan.num_ranks() > 64) return text;
  size_t widest = 0;
  const auto cell = [&](int pp, int dp) {
    std::string ranks;
    for (int tp = 0; tp < plan.tp; ++tp) {
      const int rank = (pp * plan.dp + dp) * plan.tp + tp;
      const auto here = size_t(rank) < devices.size() ? to_text(devices[size_t(rank)]) : "";
      ranks += cat(tp > 0 ? " " : "", rank, here.empty() ? "" : ":" + here);
    }
    return ranks;
  };
  for (int pp = 0; pp < plan.pp; ++pp)
    for (int dp = 0; dp < plan.dp; ++dp) widest = std::max(widest, cell(pp, dp).size());
  for (int pp = 0; pp < plan.pp; ++pp) {
    text += plan.pp > 1 ? cat("  stage ", pp, pp < 10 ? "  " : " ") : std::string("  ");
    for (int dp = 0; dp < plan.dp; ++dp) {
      const auto ranks = cell(pp, dp);
      text += cat("[ ", ranks, std::string(widest - ranks.size(), ' '), " ] ");
    }
    text += "\n";
  }
  return text;
}

std::string line_of(const train::Step& step, int64_t steps, const char* unit) {
  char text[200];
  const auto width = int(std::to_string(steps).size());
  char mfu[32] = "";
  if (step.mfu > 0) std::snprintf(mfu, sizeof mfu, "   MFU %4.1f %%", 100 * step.mfu);
  std::snprintf(
      text, sizeof text,
      "step %*ld/%ld   loss %8.5f   norm %8.4f   lr %.2e   %8.0f %s/s%s   %7.1f ms   %6.0f MB",
      width, long(step.step), long(steps), step.loss, step.grad_norm, step.lr, step.tokens_per_s,
      unit, mfu, step.seconds * 1e3, double(step.memory_bytes) / 1e6);
  return text;
}

// What rank 0 shows: a line for a step on stdout, and on a terminal how far it is.
class Screen {
 public:
  Screen(const train::Config& config, bool json, const char* unit)
      : config_(config), json_(json), unit_(unit) {}
  void begin(int64_t done) {
    if (json_) return;
    progress_.emplace(std::cerr, clock_,
                      observe::ProgressOptions{.label = "train",
                                               .total = uint64_t(config_.train.steps),
                                               .initial = uint64_t(done),
                                               .is_terminal = is_terminal_});
  }
  void show(const train::Step& step) {
    const auto& [steps, every] = std::tie(config_.train.steps, config_.train.log_every);
    if (step.step % every == 0 || step.step == steps || step.step == 1)
      say(json_ ? json_of(step) : line_of(step, steps, unit_));
    if (progress_ && is_terminal_) progress_->update(uint64_t(step.step), cat("loss ", step.loss));
  }
  void say(const std::string& line) {
    if (is_terminal_ && progress_) std::fputs("\r\033[K", stderr);
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

 private:
  const train::Config& config_;
  const bool json_;
  const char* const unit_;  // of what is counted in a second
  const bool is_terminal_ = ::isatty(STDERR_FILENO) == 1;
  const SteadyClock clock_;
  std::optional<observe::Progress> progress_;
};

train::TrainerOptions trainer_options(const train::Config& config, const plan::Plan& plan,
                                      const train::Sizes& sizes, bool resume) {
  const auto& [train, save] = std::tie(config.train, config.checkpoint);
  train::TrainerOptions options{.plan = plan,
                                .steps = train.steps,
                                .batch = sizes.batch,
                                .optimizer = train.optimizer,
                                .weight_decay = train.weight_decay,
                                .clip = train.clip,
                                .seed = uint64_t(train.seed),
                                .shuffle = config.data.shuffle,
                                .checkpoints = RunFolder::checkpoints_of(config),
                                .save_every = save.every,
                                .keep = save.keep,
                                .async = save.async,
                                .resume = resume};
  options.lr = {.shape = parallel::parse_lr_shape(train.lr_schedule),
                .lr = train.lr,
                .warmup = train.warmup,
                .steps = train.steps,
                .lowest = 0.1};
  if (train.precision == "bf16") options.precision = parallel::Precision::Bf16;
  if (train.precision == "fp16") options.precision = parallel::Precision::Fp16;
  options.on_nan = train.on_nan == "skip"       ? train::TrainerOptions::OnNan::Skip
                   : train.on_nan == "rollback" ? train::TrainerOptions::OnNan::Rollback
                                                : train::TrainerOptions::OnNan::Stop;
  options.spike = train.spike;
  options.eval_every = train.eval_every;
  options.val_fraction = config.data.val_fraction;
  options.timeout = Duration(int64_t(config.run.timeout_s * 1e9));
  options.values["config"] = train::to_toml(config);
  options.values["plan"] = plan::to_text(plan);
  options.values["architecture"] = models::to_json(train::architecture(config, at::kCPU));
  options.workers = int(config.data.workers);
  return options;
}

// The same bits from every run: what a GPU has no such way for is an error that names it.
void be_deterministic() {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicFillUninitializedMemory(false);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
}

int train(const Options& options) {
  if (options.keys) {
    std::cout << train::describe_keys();
    return 0;
  }
  auto config = read_config(options);
  train::settle(config);
  const auto launch = topo::discover(read_environment());
  if (config.run.max_restarts > 0 && !options.dry_run && !is_supervised() &&
      launch.world_size == 1) {
    RunFolder::check(config, options.resume);  // else the child's --resume would hide it
    return supervise(own_command(), config.run.max_restarts);
  }
  if (config.run.max_restarts > 0 && launch.world_size > 1 && launch.rank == 0)
    std::cerr << "yoke: run.max_restarts is for one process; restarts are for "
              << to_string(launch.launcher) << " to make\n";
  if (config.run.deterministic) be_deterministic();
  const auto host = read_visible_host(read_environment());
  const auto devices = devices_of(config, launch, host);
  const bool speaks = launch.rank == 0;
  const auto [plan, sizes] = train::resolve(config, int(devices.size()) * launch.world_size);
  const auto device = devices[0].kind == topo::DeviceKind::Cuda ? at::Device(at::kCUDA) : at::kCPU;
  const auto model = models::make_model(train::architecture(config, device));
  if (!options.json && speaks) {
    if (options.dry_run) std::cout << train::to_toml(config) << "\n";
    std::cout << header(config, plan, sizes, model, devices) << std::flush;
  }
  if (options.dry_run) return 0;
  const auto dataset = train::open_data(config);
  const comm::StopSignal stop;
  auto trainer_settings = trainer_options(config, plan, sizes, options.resume);
  trainer_settings.stop = &stop;
  trainer_settings.peak_flops = peak_flops(host, devices[0], config.train.precision != "fp32");
  const SteadyClock clock;
  observe::Tracer tracer(clock);
  if (!config.run.trace_steps.empty()) {
    trainer_settings.tracer = &tracer;
    trainer_settings.trace_first = config.run.trace_steps[0];
    trainer_settings.trace_last = config.run.trace_steps[1];
  }
  train::Trainer trainer(model, dataset, trainer_settings);
  Screen screen(config, options.json, model.tokens > 1 ? "tok" : "samples");
  std::optional<RunFolder> folder;
  bool log_failed = false;
  trainer.callbacks.on_begin = [&](int64_t done) {
    folder->begin(done);
    if (done > 0 && !options.json) screen.say(cat("goes on after step ", done));
    screen.begin(done);
  };
  trainer.callbacks.on_step = [&](const train::Step& step) {
    try {
      folder->write(step);
    } catch (const Error& error) {  // a full disk: the model is worth more than its log
      if (!std::exchange(log_failed, true)) std::cerr << "yoke: " << error.what() << "\n";
    }
    screen.show(step);
  };
  trainer.callbacks.on_trouble = [](const std::string& what) {
    std::cerr << "yoke: " << what << "\n";
  };
  trainer.callbacks.on_eval = [&](int64_t step, const train::Evaluated& result) {
    folder->write_eval(step, result);
    const auto [loss, accuracy] = result;
    screen.say(options.json ? json_of(step, result)
                            : cat("step ", step, "   validation loss ", loss,
                                  accuracy < 0 ? "" : cat("   accuracy ", 100 * accuracy, " %")));
  };
  trainer.callbacks.on_save = [&](int64_t step, Duration held_up) {
    const double ms = std::chrono::duration<double, std::milli>(held_up).count();
    screen.say(options.json ? observe::JsonObject({{"step", step}, {"checkpoint_ms", ms}}).text()
                            : cat("step ", step, "   checkpoint; the step took ",
                                  duration_text(held_up), " longer"));
  };
  trainer.callbacks.on_traced = [&](Time since) {
    std::ostringstream text;
    tracer.write_chrome_trace(text, since);
    checkpoint::write_durably(RunFolder::path_of(config) / trace_name(launch.rank), text.str());
  };
  trainer.callbacks.on_save_failed = [&](const std::string& why) {
    std::cerr << "yoke: " << why << "; training goes on\n";
  };

  FlightWatch watch;
  comm::JoinOptions join{.run = {.world = {.timeout = trainer_settings.timeout}},
                         .ranks = int(devices.size()),
                         .stop = &stop};
  if (devices[0].kind == topo::DeviceKind::Cuda) join.run.devices = devices;
  join.run.on_world = watch.on_world();
  join.meet_timeout = trainer_settings.timeout;
  std::atomic<int> signal = 0;
  try {
    comm::run_world(
        launch,
        [&](comm::Communicator& world) {
          if (world.rank() == 0) {  // in here: what is wrong is told to all
            RunFolder::check(config, options.resume);
            folder.emplace(config, plan);
          }
          signal = trainer.fit(world);
        },
        join);
  } catch (const Error& error) {
    const auto kind = error.kind();
    if (kind == Kind::Comm || kind == Kind::Timeout || kind == Kind::Device) watch.dump();
    throw;
  }
  const auto saved = checkpoint::latest(RunFolder::checkpoints_of(config));
  if (speaks && !options.json && saved)
    screen.say(cat(signal == 0 ? "done; " : "stopped; ", "the model is in ", saved->string(),
                   signal == 0 ? "" : "; the same command with --resume goes on"));
  return signal == 0 ? 0 : signal == SIGUSR1 ? kRequeue : 128 + int(signal);
}

}  // namespace

void add_train(CLI::App& app) {
  auto* verb = app.add_subcommand("train", "Train a model, and save it");
  auto options = std::make_shared<Options>();
  verb->add_option(
      "CONFIG", options->words,
      "A TOML file, then section.key=value on top of it; plan=WORD chooses a strategy: "
      "data, zero1, zero2, zero3, tensor, pipeline, layer, or AxBxC = pp x dp x tp");
  verb->add_option("--devices", options->devices,
                   "cpu:4 (four ranks), cuda:0-3, cuda:0x4, auto; as run.devices");
  verb->add_flag("--dry-run", options->dry_run, "Print config, plan and memory, and start nothing");
  verb->add_flag("--resume", options->resume,
                 "Go on from the run's newest checkpoint, if it has one");
  verb->add_flag("--json", options->json, "One JSON object for each step");
  verb->add_flag("--keys", options->keys, "Print every key of a config, and what it is");
  verb->footer(
      "Exit codes: 0 done; 1 failed; 2 usage or config; 3 a rank or device failed; after a "
      "checkpoint 85 on SIGUSR1,\n128 + n on SIGTERM or SIGINT.");
  verb->callback([options] {
    if (const int code = train(*options)) throw CLI::RuntimeError(code);
  });
}

}  // namespace yoke::cli
