// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_train.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_data.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/models/gpt.h"
#include "yoke/observe/json_lines.h"
#include "yoke/train/trainer.h"

namespace yoke::cli {
namespace {

constexpr int64_t kVocab = 1024, kSeq = 256, kSamples = 4;  // of a rank, in a step
constexpr int kWarmUp = 3;

// As bench/peers/data.py --loop: new samples, forward, backward, clipping, AdamW, the loss looked
// at.
class Loop final : public Trainer {
 public:
  explicit Loop(plan::Plan plan) : plan_(std::move(plan)) {}
  double round(int steps) override {
    const auto model =
        models::make_gpt({.layers = 4, .dim = 256, .heads = 4, .vocab = kVocab, .seq = kSeq});
    train::Trainer trainer(model, data::synthetic_words(kVocab, kSeq, 1),
                           {.plan = plan_,
                            .steps = kWarmUp + steps,
                            .batch = kSamples * plan_.num_ranks(),
                            .lr = {.lr = 1e-4, .steps = kWarmUp + steps}});
    const SteadyClock clock;
    Time begin, end;
    trainer.callbacks.on_step = [&](const train::Step& step) {
      (step.step == kWarmUp ? begin : end) = clock.now();
    };
    comm::run_ranks(plan_.num_ranks(), [&](comm::Communicator& world) { trainer.fit(world); },
                    {.threads_per_rank = 1});
    return std::chrono::duration<double>(end - begin).count();
  }

 private:
  const plan::Plan plan_;
};

struct Options {
  std::string plans = "dp=1,dp=2", peers;
  int rounds = 7, steps = 0;
  bool json = false;
};

void bench(const Options& options) {
  if (options.rounds < 1 || options.steps < 0)
    fail(Kind::Usage, "--rounds wants 1 or more, --steps 0 or more; got ", options.rounds, " and ",
         options.steps);
  std::vector<std::string> names = split(options.plans, ',');
  const size_t num_ours = names.size();
  for (const auto& name : names)
    plan::parse_plan(name).check(plan::parse_plan(name).num_ranks(), 6);
  if (!options.peers.empty())
    for (const auto& peer : words("--peers", options.peers, {"torch", "ddp"}))
      names.push_back(peer);
  const Turns turns(
      names,
      [&](const std::string& name) -> std::unique_ptr<Trainer> {
        if (name != "torch" && name != "ddp") return std::make_unique<Loop>(plan::parse_plan(name));
        return make_peer("data.py", {"--peer", name == "torch" ? "alone" : name, "--model", "gpt",
                                     "--ranks", "2", "--threads", "1", "--loop"});
      },
      options.rounds, options.steps, "train");
  if (!options.json)
    std::printf("| %-24s | %10s | %10s | %s |\n|%s|\n", "what", "ms a step", "tok/s",
                "times as fast, by peer of as many ranks",
                "--------------------------|-----------:|-----------:|---");
  for (size_t i = 0; i < names.size(); ++i) {
    const int ranks = i < num_ours        ? plan::parse_plan(names[i]).num_ranks()
                      : names[i] == "ddp" ? 2
                                          : 1;
    const double speed = double(kSamples * kSeq * ranks) / turns.ms(i) * 1e3;
    std::vector<std::string> against;
    for (size_t other = num_ours; i < num_ours && other < names.size(); ++other)
      if ((names[other] == "ddp" ? 2 : 1) == ranks) {
        char text[64];
        std::snprintf(text, sizeof text, "%s %.3f", names[other].c_str(), turns.ratio(i, other));
        against.emplace_back(text);
      }
    if (options.json)
      observe::JsonLines(std::cout).write({{"what", names[i]},
                                           {"ms_per_step", turns.ms(i)},
                                           {"tokens_per_s", speed},
                                           {"against", join(against, ", ")}});
    else
      std::printf("| %-24s | %10.2f | %10.0f | %s |\n", names[i].c_str(), turns.ms(i), speed,
                  join(against, ", ").c_str());
  }
  std::fflush(stdout);
}

}  // namespace

void add_bench_train(CLI::App& app) {
  auto* verb = app.add_subcommand("train", "The loop of yoke train: a gpt of 3.5 M parameters");
  auto options = std::make_shared<Options>();
  verb->add_option(
          "--plans", options->plans,
          "With commas, such as dp=1,dp=2; 4 x 256 tokens a rank, each a thread with one core")
      ->capture_default_str();
  verb->add_option(
      "--peers", options->peers,
      "With commas, of torch (one process) and ddp (two, over gloo): PyTorch's, with the "
      "same loop");
  verb->add_option("--rounds", options->rounds, "How often all of them take turns")
      ->capture_default_str();
  verb->add_option("--steps", options->steps, "Steps of a round; 0: about a second")
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->callback([options] { bench(*options); });
}

}  // namespace yoke::cli
