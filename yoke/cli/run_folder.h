// SPDX-License-Identifier: Apache-2.0
// The files of one run: config.toml, plan.toml, metrics.jsonl, TensorBoard's events, checkpoints/.
// By rank 0's process alone. Errors are Kind::Io with the path.
#pragma once

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "yoke/observe/event_file.h"
#include "yoke/train/config.h"
#include "yoke/train/trainer.h"

namespace yoke::cli {

class RunFolder {
 public:
  // Throws Kind::Config if the run has checkpoints and is not to go on.
  static void check(const train::Config& config, bool resume);
  static std::filesystem::path path_of(const train::Config& config);
  static std::filesystem::path checkpoints_of(const train::Config& config);

  RunFolder(const train::Config& config, const plan::Plan& plan);
  // Nothing went wrong in the beginning: the files are written. Steps after `done`, of a run that
  // was stopped, are forgotten.
  void begin(int64_t done);
  void write(const train::Step& step);
  void write_eval(int64_t step, const train::Evaluated& result);

 private:
  const std::filesystem::path path_;
  const std::string config_, plan_;
  std::ofstream metrics_;
  std::unique_ptr<observe::EventFile> events_;
};

// As --json and metrics.jsonl have it.
std::string json_of(int64_t step, const train::Evaluated& result);
std::string json_of(const train::Step& step);

}  // namespace yoke::cli
