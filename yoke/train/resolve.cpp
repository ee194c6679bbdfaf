// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/resolve.h"

#include <algorithm>
#include <map>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/models/mlp.h"
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
  const auto model = make_model(config, at::kCPU);
  if (plan.sequence && !model.can_scatter)
    fail(Kind::Config, "plan.sequence_parallel: an ", config.model.arch,
         " has no sequence of tokens");
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

void adopt_model(Config& config) {
  auto& model = config.model;
  if (model.init.empty()) return;
  const auto options = models::read_hugging_face(model.init);
  const auto adopt = [&](const auto& chosen) {
    if (model.seq > chosen.seq)
      fail(Kind::Config, "model.seq = ", model.seq, ", and the model in '", model.init, "' knows ",
           chosen.seq, " positions");
    model.layers = chosen.layers, model.dim = chosen.dim, model.heads = chosen.heads;
    model.vocab = chosen.vocab, model.ffn = chosen.ffn;
  };
  std::visit(adopt, options);
  const auto* llama = std::get_if<models::LlamaOptions>(&options);
  if (config.data.kind == "text" && model.vocab < 256)
    fail(Kind::Config, "the model in '", model.init, "' knows ", model.vocab,
         " words, and the tokens of text are 256 bytes; say data.kind=synthetic");
  model.arch = llama ? "llama" : "gpt";
  model.kv_heads = llama ? llama->kv_heads : 0;
}

std::optional<models::WordsOptions> words_options(const Config& config) {
  const auto& model = config.model;
  if (model.arch == "mlp") return std::nullopt;
  using parallel::Checkpointing;
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
        chosen.seed = uint64_t(config.train.seed);
        chosen.recompute = config.plan.recompute == "full"        ? Checkpointing::Full
                           : config.plan.recompute == "selective" ? Checkpointing::Selective
                                                                  : Checkpointing::None;
      },
      options);
  return options;
}

models::Model make_model(const Config& config, at::Device device) {
  if (auto words = words_options(config)) {
    std::visit([&](auto& chosen) { chosen.device = device; }, *words);
    return models::make_words(*words);
  }
  const auto& model = config.model;
  return models::make_mlp({.layers = model.layers,
                           .dim = model.dim,
                           .ffn = model.ffn,
                           .seed = uint64_t(config.train.seed),
                           .device = device});
}

std::shared_ptr<data::Dataset> open_data(const Config& config) {
  const auto seed = uint64_t(config.train.seed);
  if (config.model.arch == "mlp") {
    if (config.data.kind != "synthetic")
      fail(Kind::Config, "data.kind: an mlp takes vectors, not ", config.data.kind,
           "; say data.kind=synthetic");
    return data::synthetic_vectors(config.model.dim, seed);
  }
  if (config.data.kind == "synthetic")
    return data::synthetic_words(config.model.vocab, config.model.seq, seed);
  if (config.data.kind == "tokens")
    return data::open_tokens(config.data.path, config.model.seq, config.model.vocab);
  return data::open_text(config.data.path, config.model.seq);
}

}  // namespace yoke::train
