// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/config.h"

#include <algorithm>
#include <cmath>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/config/keys.h"

namespace yoke::train {
namespace {

using config::Field;
using config::Fields;

Fields fields_of(Config& config) {
  auto& [model, data, train, plan, checkpoint, run] = config;
  return {
      {"model", "arch", &model.arch, "the architecture", "gpt llama mlp resnet vit torchscript"},
      {"model", "layers", &model.layers, "of the model; 0: 4, of resnet 18 (or 34, 50), of vit 6",
       0},
      {"model", "dim", &model.dim, "features between layers; 0: 128, of resnet 64", 0},
      {"model", "heads", &model.heads, "heads of attention, which divide dim", 1},
      {"model", "vocab", &model.vocab, "different tokens; 0: as the tokenizer has, 256 for bytes",
       0},
      {"model", "seq", &model.seq, "tokens of a sample", 1},
      {"model", "ffn", &model.ffn,
       "features inside a feed-forward layer; 0: 4 x dim, of llama 8/3 x dim", 0},
      {"model", "kv_heads", &model.kv_heads, "of llama: heads of keys and values; 0: as heads", 0},
      {"model", "patch", &model.patch, "of vit: side of a patch; 0: a quarter of an image", 0},
      {"model", "channels", &model.channels, "of images: 1 or 3; 0: as the data has", 0},
      {"model", "size", &model.size, "of images: their side; 0: as the data has", 0},
      {"model", "classes", &model.classes, "that images are sorted into; 0: as the data has", 0},
      {"model", "path", &model.path, "of torchscript: the file"},
      {"model", "init", &model.init,
       "a Hugging Face folder to begin with; empty: drawn by the seed"},

      {"data", "kind", &data.kind, "what is learned from", "text tokens images synthetic"},
      {"data", "path", &data.path,
       "a file or folder, of text several with commas; empty: Yoke's own text"},
      {"data", "tokenizer", &data.tokenizer,
       "of text: a tokenizer.json, a .model, a folder with one; empty: bytes"},
      {"data", "documents", &data.documents, "of text, tokens: each sees its own document alone"},
      {"data", "end", &data.end, "of tokens with documents: the token after each", -1},
      {"data", "augment", &data.augment, "of images: other parts of them, or mirrored, by chance"},
      {"data", "shuffle", &data.shuffle, "whether samples come in another order each epoch"},
      {"data", "val_fraction", &data.val_fraction, "part kept for evaluation, below 1", 0},
      {"data", "workers", &data.workers, "threads of each rank that read ahead; 0: none", 0},

      {"train", "steps", &train.steps, "steps of the optimizer", 1},
      {"train", "batch", &train.batch, "samples of a step; 0: from the others", 0},
      {"train", "micro_batch", &train.micro_batch, "samples of one pass; 0: from the others", 0},
      {"train", "lr", &train.lr, "the highest learning rate", 0},
      {"train", "lr_schedule", &train.lr_schedule, "its shape over the steps",
       "constant cosine linear wsd"},
      {"train", "warmup", &train.warmup, "steps until the learning rate is at its highest", 0},
      {"train", "weight_decay", &train.weight_decay, "how strongly weights are pulled to 0", 0},
      {"train", "clip", &train.clip, "the largest norm of the gradient; 0: any", 0},
      {"train", "optimizer", &train.optimizer, "the optimizer", "adamw sgd lion"},
      {"train", "seed", &train.seed, "of weights, dropout and the order of samples"},
      {"train", "precision", &train.precision, "of forward and backward", "fp32 bf16 fp16"},
      {"train", "batch_norm", &train.batch_norm, "of resnet: over all replicas, or each by itself",
       "sync local"},
      {"train", "on_nan", &train.on_nan, "when the loss is no number", "stop skip rollback"},
      {"train", "spike", &train.spike, "standard deviations up that make a spike; 0: never", 0},
      {"train", "eval_every", &train.eval_every, "steps between evaluations; 0: none", 0},
      {"train", "log_every", &train.log_every, "steps between lines of the log", 1},

      {"plan", "preset", &plan.preset, "AxBxC = pp x dp x tp, or a word",
       "data zero1 zero2 zero3 tensor pipeline layer"},
      {"plan", "dp", &plan.dp, "replicas; 0: as preset and devices say", 0},
      {"plan", "tp", &plan.tp, "ranks that share a layer; 0: as preset and devices say", 0},
      {"plan", "pp", &plan.pp, "stages of a pipeline; 0: as preset and devices say", 0},
      {"plan", "zero", &plan.zero, "stage of ZeRO, 0 to 3; -1: as preset says", -1},
      {"plan", "schedule", &plan.schedule, "of a pipeline; empty: 1f1b, or as preset says"},
      {"plan", "micro_batches", &plan.micro_batches, "passes of a step; 0: from the batches", 0},
      {"plan", "sequence_parallel", &plan.sequence_parallel, "tp cuts tokens between layers too"},
      {"plan", "recompute", &plan.recompute, "of activations, to save memory",
       "none selective full"},
      {"plan", "layers_per_stage", &plan.layers_per_stage, "layers of each stage; empty: by cost",
       1},

      {"checkpoint", "dir", &checkpoint.dir, "the folder; empty: checkpoints in the run's"},
      {"checkpoint", "every", &checkpoint.every, "steps between them; 0: at the end alone", 0},
      {"checkpoint", "keep", &checkpoint.keep, "how many of the newest stay", 1},
      {"checkpoint", "async", &checkpoint.async, "whether training goes on while they are written"},

      {"run", "name", &run.name, "the run's name"},
      {"run", "dir", &run.dir, "the folder of all runs"},
      {"run", "devices", &run.devices, "auto, cpu:4, cuda:0-3"},
      {"run", "deterministic", &run.deterministic, "the same bits from every run, also on a GPU"},
      {"run", "timeout_s", &run.timeout_s, "seconds that ranks wait for each other", 0},
      {"run", "max_restarts", &run.max_restarts, "how often a failed run starts again", 0},
      {"run", "trace_steps", &run.trace_steps, "first and last step of trace.json; empty: none", 0},
  };
}

void check(Fields& fields, const Config& config) {
  const auto bad = [&](const char* key, const auto&... wanted) {
    refuse(*std::ranges::find(fields, key, &Field::key), wanted...);
  };
  const auto& [model, data, train, plan, checkpoint, run] = config;
  const auto axes = split(plan.preset, 'x');
  const auto counts = [](const std::string& axis) {
    const int64_t count = parse_int(axis).value_or(0);
    return count >= 1 && count <= INT32_MAX;
  };
  const bool mesh = axes.size() == 3 && std::ranges::all_of(axes, counts);
  auto& preset = *std::ranges::find(fields, "plan.preset", &Field::key);
  if (!mesh && !plan.preset.empty() && !std::ranges::count(preset.words, plan.preset))
    refuse(preset, "one of ", join(preset.words, ", "), ", AxBxC",
           config::meant(nearest(plan.preset, preset.words)));
  preset.words.clear();
  config::check(fields);
  const bool has_heads = model.arch == "gpt" || model.arch == "llama" || model.arch == "vit";
  if (has_heads && model.dim % model.heads != 0)
    bad("model.heads", "a divisor of model.dim = ", model.dim);
  if (model.arch == "llama" && model.kv_heads > 0 && model.heads % model.kv_heads != 0)
    bad("model.kv_heads", "a divisor of model.heads = ", model.heads);
  if (data.kind == "tokens" && data.path.empty())
    bad("data.path", "a .bin or .npy file of tokens, or a folder of them");
  if (data.kind == "images" && data.path.empty())
    bad("data.path", "a folder of images, or of MNIST's IDX files");
  const bool is_bytes = data.kind == "text" && data.tokenizer.empty() && model.init.empty();
  if (is_bytes && model.vocab > 0 && model.vocab < 256)
    bad("model.vocab", "at least 256, as the tokens of text are bytes");
  if (data.workers > 64) bad("data.workers", "at most 64");
  if (data.val_fraction >= 1) bad("data.val_fraction", "less than 1");
  if (plan.zero > 3) bad("plan.zero", "-1 to 3");
  if (run.timeout_s == 0 || run.timeout_s > INT32_MAX)
    bad("run.timeout_s", "more than 0, and at most ", INT32_MAX);
  const auto& steps = run.trace_steps;
  if (!steps.empty() && (steps.size() != 2 || steps[0] > steps[1]))
    bad("run.trace_steps", "none, or the first and the last step");
}

}  // namespace

Config parse_config(const std::string& text, const std::string& where,
                    const std::vector<std::string>& overrides) {
  Config config;
  auto fields = fields_of(config);
  for (auto& field : fields) {
    field.from = where + ": ";
    if (field.key() == "train.seed") field.most = INFINITY;
  }
  config::read_toml(fields, text, where);
  for (const auto& word : overrides)
    config::read_override(fields,
                          word.starts_with("plan=") ? "plan.preset" + word.substr(4) : word);
  check(fields, config);
  return config;
}

std::string to_toml(const Config& config) {
  Config copy = config;
  return config::to_toml(fields_of(copy));
}

std::string describe_keys() {
  Config usual;
  return config::describe(fields_of(usual));
}

}  // namespace yoke::train
