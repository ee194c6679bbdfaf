// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_train.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_data.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/environment.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/models/gpt.h"
#include "yoke/observe/json_lines.h"
#include "yoke/train/trainer.h"

namespace yoke::cli {
namespace {

constexpr int kWarmUp = 3;

struct Options {
  std::string model = "gpt", device = "cpu", plans, peers, trace;
  int64_t batch = 4;  // samples of a rank, in a step
  int rounds = 7, steps = 0;
  bool json = false;
};

models::GptOptions sizes_of(const Options& options) {
  const at::Device device(options.device);
  if (options.model == "gpt2")  // with words up to the next multiple of 64: matrices like that
    return {.layers = 12, .dim = 768, .heads = 12, .vocab = 50304, .seq = 1024, .device = device};
  return {.layers = 4, .dim = 256, .heads = 4, .vocab = 1024, .seq = 256, .device = device};
}

// As bench/peers/data.py --loop: new samples, forward, backward, clipping, AdamW, the loss looked
// at.
class Loop final : public Trainer {
 public:
  Loop(const Options& options, plan::Plan plan) : options_(options), plan_(std::move(plan)) {}
  double round(int steps) override {
    const auto sizes = sizes_of(options_);
    train::Trainer trainer(models::make_gpt(sizes),
                           data::synthetic_words(sizes.vocab, sizes.seq, 1),
                           {.plan = plan_,
                            .steps = kWarmUp + steps,
                            .batch = options_.batch * plan_.num_ranks(),
                            .lr = {.lr = 1e-4, .steps = kWarmUp + steps},
                            .precision = options_.model == "gpt2" ? parallel::Precision::Bf16
                                                                  : parallel::Precision::AsIs});
    const SteadyClock clock;
    Time begin, end;
    trainer.callbacks.on_step = [&](const train::Step& step) {
      (step.step == kWarmUp ? begin : end) = clock.now();
    };
    comm::RunOptions run{.threads_per_rank = 1};
    if (options_.device != "cpu")
      run.devices.assign(size_t(plan_.num_ranks()), topo::parse_devices(options_.device).at(0));
    comm::run_ranks(
        plan_.num_ranks(), [&](comm::Communicator& world) { trainer.fit(world); }, run);
    if (options_.device != "cpu") c10::getDeviceAllocator(sizes.device.type())->emptyCache();
    return std::chrono::duration<double>(end - begin).count();
  }

 private:
  const Options options_;
  const plan::Plan plan_;
};

void check(const Options& options) {
  if (options.rounds < 1 || options.steps < 0 || options.batch < 1)
    fail(Kind::Usage, "--rounds and --batch want 1 or more, --steps 0 or more; got ",
         options.rounds, ", ", options.batch, " and ", options.steps);
  if (options.model != "gpt" && options.model != "gpt2")
    fail(Kind::Usage, "--model is gpt or gpt2, got '", options.model, "'");
}

// With what it is compared: a peer of as many ranks.
int ranks_of(const std::string& name) {
  return name == "ddp"                          ? 2
         : name == "torch" || name == "compile" ? 1
                                                : plan::parse_plan(name).num_ranks();
}

void bench(const Options& options) {
  check(options);
  const bool on_gpu = options.device != "cpu";
  const auto sizes = sizes_of(options);
  std::vector<std::string> names = split(!options.plans.empty() ? options.plans
                                         : on_gpu               ? "dp=1"
                                                                : "dp=1,dp=2",
                                         ',');
  const size_t num_ours = names.size();
  for (const auto& name : names)
    plan::parse_plan(name).check(plan::parse_plan(name).num_ranks(), int(sizes.layers + 2));
  if (!options.peers.empty())
    for (const auto& peer : words("--peers", options.peers, {"torch", "ddp", "compile"}))
      names.push_back(peer);
  const Turns turns(
      names,
      [&](const std::string& name) -> std::unique_ptr<Trainer> {
        if (name != "torch" && name != "ddp" && name != "compile")
          return std::make_unique<Loop>(options, plan::parse_plan(name));
        return make_peer("data.py", {"--peer", name == "torch" ? "alone" : name, "--model",
                                     options.model, "--ranks", "2", "--threads", "1", "--loop",
                                     "--device", options.device, "--batch", cat(options.batch)});
      },
      options.rounds, options.steps, "train");
  const double peak =
      peak_flops(read_visible_host(read_environment()), topo::parse_devices(options.device).at(0),
                 options.model == "gpt2");
  const double flops = models::make_gpt(sizes).flops;
  if (!options.json)
    std::printf("| %-24s | %10s | %10s | %6s | %s |\n|%s|\n", "what", "ms a step", "tok/s", "MFU",
                "times as fast, by peer of as many ranks",
                "--------------------------|-----------:|-----------:|-------:|---");
  for (size_t i = 0; i < names.size(); ++i) {
    const int ranks = ranks_of(names[i]);
    const double speed = double(options.batch * sizes.seq * ranks) / turns.ms(i) * 1e3;
    const double mfu = peak > 0 ? speed * flops / peak : 0;
    std::vector<std::string> against;
    for (size_t other = num_ours; i < num_ours && other < names.size(); ++other)
      if (ranks_of(names[other]) == ranks) {
        char text[64];
        std::snprintf(text, sizeof text, "%s %.3f", names[other].c_str(), turns.ratio(i, other));
        against.emplace_back(text);
      }
    if (options.json)
      observe::JsonLines(std::cout).write({{"what", names[i]},
                                           {"ms_per_step", turns.ms(i)},
                                           {"tokens_per_s", speed},
                                           {"mfu", mfu},
                                           {"against", join(against, ", ")}});
    else
      std::printf("| %-24s | %10.2f | %10.0f | %6s | %s |\n", names[i].c_str(), turns.ms(i), speed,
                  mfu > 0 ? cat(int(1000 * mfu + 0.5) / 10.0, " %").c_str() : "",
                  join(against, ", ").c_str());
  }
  std::fflush(stdout);
  if (!options.trace.empty()) trace_overlap(turns.trainer(0), 5, options.trace);
}

}  // namespace

void add_bench_train(CLI::App& app) {
  auto* verb = app.add_subcommand("train", "The loop of yoke train, next to PyTorch's");
  auto options = std::make_shared<Options>();
  verb->add_option("--model", options->model,
                   "gpt: 3.5 M parameters, 256 tokens a sample; gpt2: 124 M in bf16, 1,024")
      ->capture_default_str();
  verb->add_option("--device", options->device, "cpu, or a GPU such as cuda:0")
      ->capture_default_str();
  verb->add_option("--batch", options->batch, "Samples of a rank, in a step")
      ->capture_default_str();
  verb->add_option("--plans", options->plans,
                   "With commas; each rank is a thread with one core [dp=1,dp=2, on a GPU dp=1]");
  verb->add_option("--peers", options->peers,
                   "With commas, of torch (one process), compile (the same, torch.compile) and ddp "
                   "(two processes, over gloo): PyTorch's, with the same loop");
  verb->add_option("--trace", options->trace,
                   "Write a timeline of some steps of the first plan, of LibTorch's profiler");
  verb->add_option("--rounds", options->rounds, "How often all of them take turns")
      ->capture_default_str();
  verb->add_option("--steps", options->steps, "Steps of a round; 0: about a second")
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->callback([options] { bench(*options); });
}

}  // namespace yoke::cli
