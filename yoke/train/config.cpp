// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <variant>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::train {
namespace {

using List = std::vector<int64_t>;
using Words = std::vector<std::string>;
using Slot = std::variant<int64_t*, double*, bool*, std::string*, List*>;
constexpr const char* kWanted[] = {"an integer", "a number, as 0.5 or 3e-4", "true or false",
                                   "a string", "a list of integers"};  // as Slot's
constexpr double kAny = -INFINITY;

// One key, tied to its place in a config.
struct Field {
  Field(const char* section, const char* name, Slot slot, const char* about, double least = kAny)
      : section(section), name(name), slot(slot), about(about), least(least) {}
  Field(const char* section, const char* name, Slot slot, const char* about, std::string_view words)
      : section(section), name(name), slot(slot), about(about), words(split(words, ' ')) {}
  std::string key() const { return cat(section, ".", name); }

  std::string section, name;
  Slot slot;
  std::string about;
  double least = kAny;    // of a number, or of each in a list
  Words words = {};       // that a string may be; none: any
  std::string from = {};  // who said the value, as errors begin
};

std::vector<Field> fields_of(Config& config) {
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

// As TOML has them.
std::string text_of(const toml::node& node) {
  std::ostringstream out;
  out << toml::toml_formatter(node, toml::format_flags::allow_unicode_strings);
  return out.str();
}
std::string text_of(const std::string& value) { return text_of(toml::value<std::string>(value)); }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return cat(value); }
std::string text_of(double value) {
  char text[32];
  const auto general = std::chars_format::general;  // the shortest that is read back the same
  std::string result(text, std::to_chars(text, std::end(text), value, general).ptr);
  return result.find_first_of(".ein") == result.npos ? result + ".0" : result;
}
std::string text_of(const List& value) {
  Words words;
  for (const auto number : value) words.push_back(cat(number));
  return cat("[", join(words, ", "), "]");
}
std::string text_of(const Slot& slot) {
  return std::visit([](const auto* value) { return text_of(*value); }, slot);
}

std::string trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

// False where the value is of another kind. 3 is a number, and 3.0 an integer.
bool assign(const Slot& slot, const toml::node& node) {
  const auto put = [&](auto* to) {
    using To = std::remove_pointer_t<decltype(to)>;
    if constexpr (std::is_same_v<To, List>) {
      List list;
      if (!node.is_array()) return false;
      for (const auto& part : *node.as_array())
        if (!assign(&list.emplace_back(), part)) return false;
      *to = list;
      return true;
    } else {
      constexpr bool whole = std::is_same_v<To, int64_t>,
                     number = whole || std::is_same_v<To, double>;
      // toml++ casts a number that does not fit.
      if (whole && std::abs(node.value_exact<double>().value_or(0)) >= 0x1p63) return false;
      const auto value = number && node.is_number() ? node.value<To>() : node.value_exact<To>();
      if (value) *to = *value;
      return value.has_value();
    }
  };
  return std::visit(put, slot);
}

// A key "v" with what a text means for a kind of key, or the text itself where it means nothing.
toml::table read(const Slot& slot, std::string text) {
  const auto within = [&](char open, char close) {
    return text.size() >= 2 && text.front() == open && text.back() == close;
  };
  if (std::holds_alternative<std::string*>(slot)) {
    if (within('"', '"') || within('\'', '\'')) text = text.substr(1, text.size() - 2);
    return toml::table{{"v", text}};
  }
  text = trim(text);
  if (std::holds_alternative<bool*>(slot) && (text == "yes" || text == "no"))
    return toml::table{{"v", text == "yes"}};
  if (std::holds_alternative<List*>(slot) && !within('[', ']')) text = cat("[", text, "]");
  try {
    return toml::parse(cat("v = ", text));
  } catch (const toml::parse_error&) {
    return toml::table{{"v", text}};
  }
}

[[noreturn]] void refuse(const Field& field, const auto&... wanted) {
  fail(Kind::Config, field.from, field.key(), ": got ", text_of(field.slot), ", wanted ",
       wanted...);
}

std::string meant(const Words& close) {
  return close.empty() ? "." : cat("; did you mean ", join(close, " or "), "?");
}

Field& find(std::vector<Field>& fields, const std::string& from, const std::string& key) {
  const auto found = std::ranges::find(fields, key, &Field::key);
  if (found != fields.end()) return *found;
  const std::string section = key.substr(0, key.find('.')), name = key.substr(key.find('.') + 1);
  Words sections, names, mine, close;
  for (const auto& field : fields) {
    if (sections.empty() || sections.back() != field.section) sections.push_back(field.section);
    if (!std::ranges::count(names, field.name)) names.push_back(field.name);
    if (field.section == section) mine.push_back(field.name);
  }
  if (mine.empty())
    for (const auto& near : nearest(section, sections)) close.push_back(cat("[", near, "]"));
  for (const auto& near : nearest(name, names))
    for (const auto& field : fields)
      if (field.name == near) close.push_back(field.key());
  std::stable_partition(close.begin(), close.end(),
                        [&](const auto& near) { return near.starts_with(section + "."); });
  if (mine.empty())
    fail(Kind::Config, from, key, ": no such section", meant(close), " There are ",
         join(sections, ", "));
  fail(Kind::Config, from, key, ": no such key", meant(close), " [", section, "] has ",
       join(mine, ", "));
}

void set(Field& field, const std::string& from, const toml::node& node, const std::string& got) {
  if (!assign(field.slot, node))
    fail(Kind::Config, from, field.key(), ": got ", got, ", wanted ", kWanted[field.slot.index()]);
  field.from = from;
}

void check(const std::vector<Field>& fields, const Config& config) {
  const auto bad = [&](const char* key, const auto&... wanted) {
    refuse(*std::ranges::find(fields, key, &Field::key), wanted...);
  };
  const auto& [model, data, train, plan, checkpoint, run] = config;
  const Words axes = split(plan.preset, 'x');
  const auto counts = [](const std::string& axis) {
    const int64_t count = parse_int(axis).value_or(0);
    return count >= 1 && count <= INT32_MAX;
  };
  const bool mesh = axes.size() == 3 && std::ranges::all_of(axes, counts);
  for (const auto& field : fields) {
    const auto* word = std::get_if<std::string*>(&field.slot);
    const auto* whole = std::get_if<int64_t*>(&field.slot);
    const auto* real = std::get_if<double*>(&field.slot);
    const auto* list = std::get_if<List*>(&field.slot);
    const bool preset = word && *word == &plan.preset;
    const bool free = field.words.empty() || (preset && (mesh || plan.preset.empty()));
    if (word && !free && !std::ranges::count(field.words, **word))
      refuse(field, "one of ", join(field.words, ", "), preset ? ", AxBxC" : "",
             meant(nearest(**word, field.words)));
    const auto low = [&](auto number) { return !(double(number) >= field.least); };
    if (real && !std::isfinite(**real)) refuse(field, "a finite number");
    if ((whole && low(**whole)) || (real && low(**real))) refuse(field, "at least ", field.least);
    // What is counted here is small; a seed may be anything.
    constexpr int64_t kMost = INT32_MAX;
    const auto high = [&](int64_t number) { return number > kMost; };
    const bool seed = whole && *whole == &train.seed;
    if ((whole && !seed && high(**whole)) || (list && std::ranges::any_of(**list, high)))
      refuse(field, "at most ", kMost);
    if (list && std::ranges::any_of(**list, low))
      refuse(field, "at least ", field.least, " in each");
  }
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

void read_toml(std::vector<Field>& fields, const std::string& text, const std::string& where) {
  toml::table sections;
  try {
    sections = toml::parse(std::string_view(text));
  } catch (const toml::parse_error& error) {
    const std::string what(error.description());
    const bool in_value = what.find("key") == what.npos && what.find("table") == what.npos;
    fail(Kind::Config, where, ":", error.source().begin.line, ":", error.source().begin.column,
         ": ", what, in_value ? "; words stand in quotes, true and false do not" : "");
  }
  const auto place = [&](const toml::key& key) {
    return cat(where, ":", key.source().begin.line, ": ");
  };
  const auto got = [](const toml::node& node) {
    return node.is_table() ? "a table" : cat("the ", node.type(), " ", text_of(node));
  };
  for (const auto& [section, keys] : sections) {
    if (!std::ranges::count(fields, section.str(), &Field::section))
      find(fields, place(section), std::string(section));
    if (!keys.is_table())
      fail(Kind::Config, place(section), section, ": got ", got(keys), ", wanted a section: say [",
           section, "] and its keys below");
    for (const auto& [name, node] : *keys.as_table())
      set(find(fields, place(name), cat(section, ".", name)), place(name), node, got(node));
  }
}

void read_override(std::vector<Field>& fields, const std::string& text) {
  const size_t at = text.find('=');
  const std::string key = trim(text.substr(0, at));
  if (at == text.npos || key.empty())
    fail(Kind::Config, "override '", text, "': wanted section.key=value, as train.steps=100");
  Field& field = find(fields, "override ", key == "plan" ? "plan.preset" : key);
  const std::string value = text.substr(at + 1);
  set(field, "override ", *read(field.slot, value).get("v"), cat("'", value, "'"));
  const auto* word = std::get_if<std::string*>(&field.slot);
  if (word && toml::parse("v = " + text_of(**word))["v"].value<std::string>() != **word)
    refuse(field, "text in UTF-8");
}

std::string line(const std::string& start, const std::string& mark, size_t column,
                 const Field& field) {
  std::string result = start;
  result.resize(std::max(column, start.size() + 2), ' ');
  result += mark + field.about;
  return result + (field.words.empty() ? "" : ": " + join(field.words, ", ")) + "\n";
}

}  // namespace

Config parse_config(const std::string& text, const std::string& where,
                    const std::vector<std::string>& overrides) {
  Config config;
  auto fields = fields_of(config);
  for (auto& field : fields) field.from = where + ": ";
  read_toml(fields, text, where);
  for (const auto& word : overrides) read_override(fields, word);
  check(fields, config);
  return config;
}

std::string to_toml(const Config& config) {
  Config copy = config;
  std::string result, section;
  for (const auto& field : fields_of(copy)) {
    if (field.section != section)
      result += cat(section.empty() ? "" : "\n", "[", field.section, "]\n");
    section = field.section;
    result += line(cat(field.name, " = ", text_of(field.slot)), "# ", 28, field);
  }
  return result;
}

std::string describe_keys() {
  Config usual;
  std::string result;
  for (const auto& field : fields_of(usual))
    result += line(cat(field.key(), " = ", text_of(field.slot)), "", 33, field);
  return result;
}

}  // namespace yoke::train
