// SPDX-License-Identifier: Apache-2.0
// What a run is, as plain values: TOML sections of the same names, and `section.key=value` on top
// of them. A key that does not exist is an error that names the nearest ones; so is a value of
// another kind. What was not said is as below.
//   const Config config = parse_config(text, "run.toml", {"train.steps=100", "plan=zero3"});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace yoke::train {

struct ModelConfig {
  std::string arch = "gpt";                // gpt, llama, mlp, resnet, vit, torchscript
  int64_t layers = 0, dim = 0, heads = 4;  // 0: as is usual for the architecture
  int64_t vocab = 0;                       // 0: as the tokenizer has
  int64_t seq = 128;
  int64_t ffn = 0;                              // 0: 4 x dim; of llama 8/3 x dim
  int64_t kv_heads = 0;                         // of llama; 0: as many as heads
  int64_t patch = 0;                            // of vit; 0: a quarter of size, or the next less
  int64_t channels = 0, size = 0, classes = 0;  // of images; 0: as the data has them
  std::string path = {};                        // of torchscript: the file
  // A folder of Hugging Face's, whose architecture and weights it begins with. Empty: the seed's.
  std::string init = {};
  bool operator==(const ModelConfig&) const = default;
};

struct DataConfig {
  std::string kind = "text";   // text, tokens, images, synthetic
  std::string path = {};       // a file, or a folder of them; of text, empty: Yoke's own source
  std::string tokenizer = {};  // of text: a file or folder; empty: bytes, or init's
  bool documents = false;      // of text and tokens: a token sees its own document alone
  int64_t end = -1;            // of tokens with documents: the token after each
  bool augment = false;        // of images
  bool shuffle = true;
  double val_fraction = 0;
  int64_t workers = 1;  // threads that read ahead, for each rank; 0: none
  bool operator==(const DataConfig&) const = default;
};

struct TrainConfig {
  int64_t steps = 100;
  int64_t batch = 0, micro_batch = 0;  // samples of a step, and of one pass; 0: from the others
  double lr = 1e-3;
  std::string lr_schedule = "cosine";  // constant, cosine, linear, wsd
  int64_t warmup = 0;
  double weight_decay = 0.1, clip = 1;  // clip 0: none
  std::string optimizer = "adamw";      // adamw, sgd, lion
  int64_t seed = 1;
  std::string precision = "fp32";   // fp32, bf16, fp16
  std::string batch_norm = "sync";  // sync, local
  std::string on_nan = "stop";      // stop, skip, rollback
  double spike = 0;                 // standard deviations of the loss that count as one; 0: never
  int64_t eval_every = 0, log_every = 1;
  bool operator==(const TrainConfig&) const = default;
};

struct PlanConfig {
  // data, zero1, zero2, zero3, tensor, pipeline, layer, or AxBxC = pp x dp x tp. Empty: data, or
  // what the numbers say.
  std::string preset = {};
  int64_t dp = 0, tp = 0, pp = 0, zero = -1;  // 0, -1: from the preset and the devices
  std::string schedule = {};                  // empty: 1f1b, or what the preset says
  int64_t micro_batches = 0;                  // 0: from train.batch and train.micro_batch
  bool sequence_parallel = false;
  std::string recompute = "none";  // none, selective, full
  std::vector<int64_t> layers_per_stage = {};
  bool operator==(const PlanConfig&) const = default;
};

struct CheckpointConfig {
  std::string dir = {};  // empty: checkpoints in the run's folder
  int64_t every = 0;     // steps; 0: at the end alone
  int64_t keep = 2;
  bool async = true;
  bool operator==(const CheckpointConfig&) const = default;
};

struct RunConfig {
  std::string name = "run", dir = "runs";
  std::string devices = "auto";
  bool deterministic = false;
  double timeout_s = 300;
  int64_t max_restarts = 0;
  std::vector<int64_t> trace_steps = {};  // the first and the last step of trace.json
  bool operator==(const RunConfig&) const = default;
};

struct Config {
  ModelConfig model = {};
  DataConfig data = {};
  TrainConfig train = {};
  PlanConfig plan = {};
  CheckpointConfig checkpoint = {};
  RunConfig run = {};
  bool operator==(const Config&) const = default;
};

// `text` is TOML, and `where` its name in errors, which are Kind::Config and say file, line, key,
// what was got and what was wanted. The overrides come later: "train.lr=3e-4", and "plan=zero3" for
// plan.preset.
Config parse_config(const std::string& text, const std::string& where,
                    const std::vector<std::string>& overrides);
// Every key with its value, a comment where the key has one; parse_config reads it back equal.
std::string to_toml(const Config& config);
// The keys, one a line: "train.lr = 0.001   the highest learning rate", for help and for the docs.
std::string describe_keys();

}  // namespace yoke::train
