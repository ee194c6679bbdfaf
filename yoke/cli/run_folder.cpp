// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/run_folder.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/checkpoint/saved.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

using Path = std::filesystem::path;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// What is told of a plan, as TOML.
std::string to_toml(const plan::Plan& plan) {
  return cat("pp = ", plan.pp, "\ndp = ", plan.dp, "\ntp = ", plan.tp, "\nzero = ", plan.zero,
             "\nschedule = \"", plan.schedule, "\"\nmicro_batches = ", plan.micro_batches,
             "\nsequence_parallel = ", plan.sequence ? "true" : "false",
             "\n\n# as one line\ntext = \"", plan::to_text(plan), "\"\n");
}

}  // namespace

Path RunFolder::path_of(const train::Config& config) {
  return Path(config.run.dir) / config.run.name;
}

Path RunFolder::checkpoints_of(const train::Config& config) {
  return config.checkpoint.dir.empty() ? path_of(config) / "checkpoints"
                                       : Path(config.checkpoint.dir);
}

void RunFolder::check(const train::Config& config, bool resume) {
  const auto latest = checkpoint::latest(checkpoints_of(config));
  if (latest && !resume)
    fail(Kind::Config, "'", latest->string(),
         "' is there: --resume goes on from it, and run.name=NAME ", "is another run");
}

RunFolder::RunFolder(const train::Config& config, const plan::Plan& plan)
    : path_(path_of(config)), config_(train::to_toml(config)), plan_(to_toml(plan)) {
  checkpoint::make_folder(path_);
}

void RunFolder::begin(int64_t done) {
  checkpoint::write_durably(path_ / "config.toml", config_);
  checkpoint::write_durably(path_ / "plan.toml", plan_);
  const Path path = path_ / "metrics.jsonl";
  std::string kept;
  if (done > 0 && std::filesystem::exists(path)) {
    std::ifstream before(path);
    for (std::string line; std::getline(before, line);) {
      const auto step = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (step.is_object() && step.value("step", int64_t{0}) <= done) kept += line + "\n";
    }
  }
  checkpoint::write_durably(path, kept);
  metrics_.open(path, std::ios::app);
  events_ = std::make_unique<observe::EventFile>(path_.string(), wall_seconds());
}

void RunFolder::write(const train::Step& step) {
  metrics_ << json_of(step) << "\n";
  if (!metrics_.flush())
    fail(Kind::Io, "cannot write '", (path_ / "metrics.jsonl").string(),
         "': ", std::strerror(errno));
  const double now = wall_seconds();
  for (const auto& [tag, value] : {std::pair("train/loss", step.loss),
                                   {"train/grad_norm", step.grad_norm},
                                   {"train/lr", step.lr},
                                   {"speed/tokens_per_s", step.tokens_per_s}})
    events_->scalar(tag, step.step, value, now);
  events_->flush();
}

void RunFolder::write_eval(int64_t step, const train::Evaluated& result) {
  metrics_ << json_of(step, result) << "\n" << std::flush;
  events_->scalar("val/loss", step, result.loss, wall_seconds());
  if (result.accuracy >= 0) events_->scalar("val/accuracy", step, result.accuracy, wall_seconds());
}

std::string json_of(int64_t step, const train::Evaluated& result) {
  observe::JsonObject object({{"step", step}, {"val_loss", result.loss}});
  if (result.accuracy >= 0) object.add("val_accuracy", result.accuracy);
  return object.text();
}

std::string json_of(const train::Step& step) {
  observe::JsonObject object({{"step", step.step},
                              {"loss", step.loss},
                              {"grad_norm", step.grad_norm},
                              {"lr", step.lr},
                              {"tokens_per_s", step.tokens_per_s},
                              {"ms", step.seconds * 1e3},
                              {"memory_mb", double(step.memory_bytes) / 1e6}});
  if (step.mfu > 0) object.add("mfu", step.mfu);
  return object.text();
}

}  // namespace yoke::cli
