// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/resolve.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/data/images.h"
#include "yoke/plan/balance.h"
#include "yoke/plan/generate.h"

namespace yoke::train {
namespace {

constexpr int64_t kUsualBatch = 8;

// "2x2x1".
std::optional<std::vector<int64_t>> parse_degrees(const std::string& word) {
  std::vector<int64_t> degrees;
  for (const auto& part : split(word, 'x')) {
    const auto degree = parse_int(part);
    if (!degree || *degree < 1) return std::nullopt;
    degrees.push_back(*degree);
  }
  return degrees.size() == 3 ? std::optional(degrees) : std::nullopt;
}

void apply_preset(PlanConfig& plan, int ranks) {
  const auto usual = [](int64_t& value, int64_t preset) {
    if (value <= 0) value = preset;
  };
  const std::string& word = plan.preset;
  if (word.empty() || word == "data") return;
  if (word.starts_with("zero") && word.size() == 5 && word[4] >= '1' && word[4] <= '3') {
    if (plan.zero < 0) plan.zero = word[4] - '0';
  } else if (word == "tensor") {
    usual(plan.tp, ranks);
  } else if (word == "pipeline" || word == "layer") {
    usual(plan.pp, ranks);
    if (plan.schedule.empty()) plan.schedule = word == "layer" ? "layer" : "1f1b";
    if (word == "layer") usual(plan.micro_batches, 1);
  } else if (const auto degrees = parse_degrees(word)) {
    usual(plan.pp, (*degrees)[0]);
    usual(plan.dp, (*degrees)[1]);
    usual(plan.tp, (*degrees)[2]);
  } else {
    const auto close =
        nearest(word, {"data", "zero1", "zero2", "zero3", "tensor", "pipeline", "layer"});
    fail(Kind::Config, "plan.preset: '", word,
         "' is neither data, zero1, zero2, zero3, tensor, pipeline, layer nor AxBxC = pp x dp x tp",
         close.empty() ? "" : "; did you mean " + close[0] + "?");
  }
}

// The least number of micro-batches from `least` on that the schedule takes and that divides.
int64_t choose_micro_batches(const plan::Plan& plan, int64_t per_replica, int64_t least) {
  for (int64_t count = least; count <= per_replica; ++count) {
    if (per_replica % count != 0) continue;
    try {
      auto shape = plan.shape();
      shape.micro_batches = int(count);
      plan::make_schedule(plan.schedule, shape);
      return count;
    } catch (const Error&) {  // its rule does not allow it
    }
  }
  fail(Kind::Config, "train.batch: of a step a replica gets ", per_replica,
       " samples, which no number of micro-batches from ", least, " on divides that ",
       plan.schedule, " with pp = ", plan.pp, " takes; give a larger train.batch");
}

}  // namespace

std::pair<plan::Plan, Sizes> resolve(const Config& config, int ranks) {
  PlanConfig given = config.plan;
  apply_preset(given, ranks);
  plan::Plan plan;
  plan.pp = int(std::max<int64_t>(1, given.pp));
  plan.tp = int(std::max<int64_t>(1, given.tp));
  plan.dp = int(given.dp > 0 ? given.dp : std::max<int64_t>(1, ranks / (plan.pp * plan.tp)));
  plan.zero = int(std::max<int64_t>(0, given.zero));
  plan.schedule = given.schedule.empty() ? "1f1b" : given.schedule;
  plan.sequence = given.sequence_parallel;
  for (const int64_t layers : given.layers_per_stage) plan.layers_per_stage.push_back(int(layers));
  if (int64_t(plan.pp) * plan.dp * plan.tp != ranks)
    fail(Kind::Config, "plan: pp x dp x tp = ", plan.pp, " x ", plan.dp, " x ", plan.tp, " = ",
         int64_t(plan.pp) * plan.dp * plan.tp, " ranks, and run.devices gives ", ranks);

  const auto& train = config.train;
  if ((train.eval_every > 0) != (config.data.val_fraction > 0))
    fail(Kind::Config, "train.eval_every = ", train.eval_every,
         " and data.val_fraction = ", config.data.val_fraction,
         ": evaluation wants both, how often and on which part of the data");
  const int64_t told = int64_t(plan.dp) * given.micro_batches * train.micro_batch;
  Sizes sizes{.batch = train.batch > 0 ? train.batch : told > 0 ? told : kUsualBatch};
  if (sizes.batch % plan.dp != 0)
    fail(Kind::Config, "train.batch = ", sizes.batch, " samples cannot be cut over dp = ", plan.dp,
         " replicas; give a multiple of ", plan.dp);
  const int64_t each = sizes.batch / plan.dp;
  int64_t micro = given.micro_batches;
  if (micro == 0 && train.micro_batch > 0) micro = each / train.micro_batch;
  if (micro == 0) micro = choose_micro_batches(plan, each, plan.pp);
  sizes.micro_batch =
      train.micro_batch > 0 ? train.micro_batch : each / std::max<int64_t>(1, micro);
  if (plan.dp * micro * sizes.micro_batch != sizes.batch || micro < 1)
    fail(Kind::Config, "train.batch = dp x micro_batches x micro_batch, and ", sizes.batch,
         " is not ", plan.dp, " x ", micro, " x ", sizes.micro_batch,
         "; leave out plan.micro_batches or train.micro_batch, or change train.batch");
  plan.micro_batches = int(micro);
  const auto model = models::make_model(architecture(config, at::kCPU));
  const std::string& arch = config.model.arch;
  if (config.plan.recompute != "none" && arch != "gpt" && arch != "llama" && arch != "vit")
    fail(Kind::Config, "plan.recompute: gpt, llama and vit can be computed again, not ", arch);
  if (plan.sequence && !model.can_scatter)
    fail(Kind::Config, "plan.sequence_parallel: a ", arch, " has no sequence of tokens to cut");
  if (plan.tp > 1 && !model.why_whole.empty())
    fail(Kind::Config, "plan.tp = ", plan.tp, ": ", model.why_whole, "; a ", arch,
         " trains under plan=data, zero1, zero2, zero3",
         arch == "torchscript" ? "" : ", pipeline and layer");
  if (plan.pp > 1 && arch == "torchscript")
    fail(Kind::Config, "plan.pp = ", plan.pp,
         ": a TorchScript module is one layer; it trains under plan=data, zero1, zero2, zero3");
  for (const auto& [count, what] : model.cut)
    if (count % plan.tp != 0)
      fail(Kind::Config, "plan.tp = ", plan.tp, " does not divide the ", count, " ", what,
           " of the model; choose another plan.tp, or another size");
  if (plan.sequence && model.tokens % plan.tp != 0)
    fail(Kind::Config, "plan.sequence_parallel: plan.tp = ", plan.tp, " does not divide the ",
         model.tokens, " tokens of a sample");
  plan.ties = model.ties;
  const int num_layers = int(model.layers({}).size());
  plan.check(ranks, num_layers);
  const int stages = plan::make_schedule(plan.schedule, plan.shape()).num_stages();
  if (plan.layers_per_stage.empty() && stages > 1 && !model.costs.empty())
    plan.layers_per_stage = plan::balance(model.costs, stages);
  return {plan, sizes};
}

namespace {

void usual(int64_t& value, int64_t number) {
  if (value == 0) value = number;
}

bool is_words(const ModelConfig& model) { return model.arch == "gpt" || model.arch == "llama"; }

std::shared_ptr<data::Images> open_images(const Config& config) {
  const auto& [model, data, train, plan, checkpoint, run] = config;
  data::ImagesOptions options{.size = model.size,
                              .channels = model.channels,
                              .augment = data.augment,
                              .seed = uint64_t(train.seed)};
  return data::open_images(data.path, options);
}

bool has_tokenizer(const std::filesystem::path& folder) {
  return std::ranges::any_of(
      std::vector<const char*>{"tokenizer.json", "vocab.json", "tokenizer.model"},
      [&](const char* name) { return std::filesystem::exists(folder / name); });
}

// Yoke's own source, where the program is below it.
std::string own_text() {
  std::error_code error;
  for (auto folder = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
       !folder.empty() && folder != folder.root_path(); folder = folder.parent_path())
    if (std::filesystem::exists(folder / "yoke/yoke.h") && std::filesystem::exists(folder / "docs"))
      return cat((folder / "yoke").string(), ",", (folder / "docs").string());
  fail(Kind::Config,
       "data.path: give a file or a folder of text; Yoke's own source, which else is read, is not "
       "beside the program");
}

void settle_words(Config& config) {
  auto& model = config.model;
  auto& data = config.data;
  if (!model.init.empty()) {
    const auto options = models::read_hugging_face(model.init);
    const auto adopt = [&](const auto& chosen) {
      if (model.seq > chosen.seq)
        fail(Kind::Config, "model.seq = ", model.seq, ", and the model in '", model.init,
             "' knows ", chosen.seq, " positions");
      model.layers = chosen.layers, model.dim = chosen.dim, model.heads = chosen.heads;
      model.vocab = chosen.vocab, model.ffn = chosen.ffn;
    };
    std::visit(adopt, options);
    const auto* llama = std::get_if<models::LlamaOptions>(&options);
    model.arch = llama ? "llama" : "gpt";
    model.kv_heads = llama ? llama->kv_heads : 0;
  }
  if (data.kind != "text") {
    if (model.vocab == 0) model.vocab = 256;
    return;
  }
  if (data.tokenizer.empty() && !model.init.empty()) {
    data.tokenizer = model.init;
    if (!has_tokenizer(model.init))
      fail(Kind::Config, "'", model.init,
           "' has no tokenizer; give the model's by data.tokenizer, or say data.tokenizer=bytes");
  }
  const int64_t vocab = open_tokenizer(config)->vocab();
  if (model.vocab == 0) model.vocab = vocab;
  if (model.vocab < vocab)
    fail(Kind::Config,
         model.init.empty() ? cat("model.vocab = ", model.vocab)
                            : cat("the model in '", model.init, "' knows ", model.vocab, " words"),
         ", and the tokenizer has ", vocab, " tokens");
}

void settle_images(Config& config) {
  auto& [model, data, train, plan, checkpoint, run] = config;
  if (data.kind == "images" && model.classes * model.size * model.channels == 0) {
    const auto images = open_images(config);
    if (images->height() != images->width())
      fail(Kind::Config, "data.path: the images are ", images->height(), " x ", images->width(),
           "; give model.size, the side of the square they become");
    if (model.classes > 0 && model.classes < images->num_classes())
      fail(Kind::Config, "model.classes = ", model.classes, ", and the images are of ",
           images->num_classes());
    usual(model.classes, images->num_classes());
    usual(model.channels, images->channels());
    usual(model.size, images->height());
  }
  usual(model.classes, 10);
  usual(model.channels, 3);
  usual(model.size, 32);
  if (model.patch > 0 || model.arch != "vit") return;
  model.patch = std::max<int64_t>(1, model.size / 4);
  while (model.size % model.patch != 0) --model.patch;
}

}  // namespace

void settle(Config& config) {
  auto& model = config.model;
  if (!model.init.empty() && !is_words(model))
    fail(Kind::Config, "model.init: a ", model.arch,
         " does not begin with a Hugging Face folder; gpt and llama do");
  // For who uses the model, from whatever folder.
  for (std::string* path : {&model.init, &model.path, &config.data.tokenizer})
    if (!path->empty() && *path != "bytes") *path = std::filesystem::absolute(*path).string();
  if (config.data.kind == "text" && config.data.path.empty()) config.data.path = own_text();
  if (is_words(model)) settle_words(config);
  const bool is_resnet = model.arch == "resnet", is_vit = model.arch == "vit";
  usual(model.layers, is_resnet ? 18 : is_vit ? 6 : 4);
  usual(model.dim, is_resnet ? 64 : 128);
  if (is_resnet || is_vit || config.data.kind == "images") settle_images(config);
  if (model.arch == "torchscript" && model.path.empty())
    fail(Kind::Config, "model.path: give the file of the TorchScript module");
}

models::Architecture architecture(const Config& config, at::Device device) {
  const auto& [model, data, train, plan, checkpoint, run] = config;
  using parallel::Checkpointing;
  const auto seed = uint64_t(train.seed);
  const auto recompute = plan.recompute == "full"        ? Checkpointing::Full
                         : plan.recompute == "selective" ? Checkpointing::Selective
                                                         : Checkpointing::None;
  if (model.arch == "torchscript")
    return models::ScriptOptions{.path = model.path, .device = device};
  if (model.arch == "resnet")
    return models::ResnetOptions{.depth = model.layers,
                                 .width = model.dim,
                                 .channels = model.channels,
                                 .size = model.size,
                                 .classes = model.classes,
                                 .local = train.batch_norm == "local",
                                 .seed = seed,
                                 .device = device};
  if (model.arch == "vit")
    return models::VitOptions{.layers = model.layers,
                              .dim = model.dim,
                              .heads = model.heads,
                              .ffn = model.ffn,
                              .patch = model.patch,
                              .channels = model.channels,
                              .size = model.size,
                              .classes = model.classes,
                              .seed = seed,
                              .device = device,
                              .recompute = recompute};
  if (model.arch == "mlp") {
    models::MlpOptions options{
        .layers = model.layers, .dim = model.dim, .ffn = model.ffn, .seed = seed, .device = device};
    if (data.kind == "images") {
      options.sample = {model.channels, model.size, model.size};
      options.classes = model.classes;
    }
    return options;
  }
  models::WordsOptions options;
  if (!model.init.empty())
    options = models::read_hugging_face(model.init);
  else if (model.arch == "llama")
    options = models::LlamaOptions{.layers = model.layers,
                                   .dim = model.dim,
                                   .heads = model.heads,
                                   .vocab = model.vocab,
                                   .kv_heads = model.kv_heads,
                                   .ffn = model.ffn};
  else
    options = models::GptOptions{.layers = model.layers,
                                 .dim = model.dim,
                                 .heads = model.heads,
                                 .vocab = model.vocab,
                                 .ffn = model.ffn};
  std::visit(
      [&](auto& chosen) {
        chosen.seq = model.seq;
        chosen.seed = seed;
        chosen.device = device;
        chosen.recompute = recompute;
      },
      options);
  return models::as_architecture(options);
}

std::shared_ptr<const data::Tokenizer> open_tokenizer(const Config& config) {
  const auto& [tokenizer, init] = std::tie(config.data.tokenizer, config.model.init);
  return data::open_tokenizer(!tokenizer.empty() ? tokenizer : !init.empty() ? init : "bytes");
}

std::shared_ptr<data::Dataset> open_data(const Config& config) {
  const auto& [model, data, train, plan, checkpoint, run] = config;
  const auto seed = uint64_t(train.seed);
  const bool takes_images = model.arch == "resnet" || model.arch == "vit";
  const bool takes_any = model.arch == "torchscript";
  const bool takes_vectors = model.arch == "mlp";
  const bool gives_words = data.kind == "text" || data.kind == "tokens";
  if ((gives_words && !is_words(model) && !takes_any) || (data.kind == "images" && is_words(model)))
    fail(Kind::Config, "data.kind: a ", model.arch, " takes ",
         is_words(model) ? "text, tokens or synthetic"
         : takes_images  ? "images or synthetic"
                         : "images or synthetic, which are vectors",
         ", not ", data.kind);
  if (data.documents && !gives_words)
    fail(Kind::Config, "data.documents: ", data.kind, " has none; text and tokens have");
  if (data.documents && takes_any)
    fail(Kind::Config, "data.documents: a TorchScript module knows nothing of them");
  if (data.documents && data.kind == "tokens" && data.end < 0)
    fail(Kind::Config, "data.documents: say by data.end which token is after each");
  if (data.kind == "images") {
    const auto images = open_images(config);
    if (images->num_classes() > model.classes)
      fail(Kind::Config, "model.classes = ", model.classes, ", and the images are of ",
           images->num_classes());
    return images;
  }
  if (data.kind == "tokens")
    return data::open_tokens(data.path, model.seq, model.vocab, data.documents ? data.end : -1);
  if (data.kind == "text")
    return data::open_text(
        data.path,
        {.seq = model.seq, .tokenizer = open_tokenizer(config), .documents = data.documents});
  if (takes_vectors || takes_any) return data::synthetic_vectors(model.dim, seed);
  if (takes_images) return data::synthetic_images(model.channels, model.size, model.classes, seed);
  return data::synthetic_words(model.vocab, model.seq, seed);
}

}  // namespace yoke::train
