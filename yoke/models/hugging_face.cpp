// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/hugging_face.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/safetensors.h"
#include "yoke/models/words.h"

namespace yoke::models {
namespace {

using checkpoint::Path;
using nlohmann::json;

// A tensor of theirs. One of ours is some of them, one below the other.
struct Part {
  std::string name = {};
  std::vector<int64_t> shape = {};
  bool transposed = false;  // with regard to ours
};
using Places = std::map<std::string, std::vector<Part>>;  // by our name

Places places_of(const GptOptions& options) {
  const auto& [layers, dim, heads, vocab, seq, given_ffn] =
      std::tie(options.layers, options.dim, options.heads, options.vocab, options.seq, options.ffn);
  const int64_t ffn = given_ffn == 0 ? 4 * dim : given_ffn;
  Places places;
  places[kWords] = {{"wte.weight", {vocab, dim}}};
  places["0.positions"] = {{"wpe.weight", {seq, dim}}};
  const auto add_both = [&](const std::string& ours, const std::string& theirs, int64_t in,
                            int64_t out) {
    places[ours + ".weight"] = {{theirs + ".weight", {in, out}, true}};
    places[ours + ".bias"] = {{theirs + ".bias", {out}}};
  };
  const auto add_norm = [&](const std::string& ours, const std::string& theirs) {
    for (const char* what : {".weight", ".bias"}) places[ours + what] = {{theirs + what, {dim}}};
  };
  for (int64_t i = 0; i < layers; ++i) {
    const std::string ours = cat(i + 1, "."), theirs = cat("h.", i, ".");
    add_norm(ours + "norm1", theirs + "ln_1");
    add_both(ours + "attention.qkv", theirs + "attn.c_attn", dim, 3 * dim);
    add_both(ours + "attention.out", theirs + "attn.c_proj", dim, dim);
    add_norm(ours + "norm2", theirs + "ln_2");
    add_both(ours + "up", theirs + "mlp.c_fc", dim, ffn);
    add_both(ours + "down", theirs + "mlp.c_proj", ffn, dim);
  }
  add_norm(cat(layers + 1, ".norm"), "ln_f");
  return places;
}

Places places_of(const LlamaOptions& options) {
  const int64_t dim = options.dim, ffn = options.ffn;
  const int64_t head_dim = options.head_dim == 0 ? dim / options.heads : options.head_dim;
  const int64_t queries = options.heads * head_dim;
  const int64_t keys = (options.kv_heads == 0 ? options.heads : options.kv_heads) * head_dim;
  Places places;
  places[kWords] = {{"model.embed_tokens.weight", {options.vocab, dim}}};
  for (int64_t i = 0; i < options.layers; ++i) {
    const std::string ours = cat(i + 1, "."), theirs = cat("model.layers.", i, ".");
    const auto attention = [&](const char* word) { return theirs + "self_attn." + word + "_proj"; };
    const auto gate = [&](const char* word) { return theirs + "mlp." + word + "_proj.weight"; };
    places[ours + "norm1.weight"] = {{theirs + "input_layernorm.weight", {dim}}};
    places[ours + "norm2.weight"] = {{theirs + "post_attention_layernorm.weight", {dim}}};
    for (const auto& [word, count] : {std::pair("q", queries), {"k", keys}, {"v", keys}}) {
      places[ours + "attention.qkv.weight"].push_back({attention(word) + ".weight", {count, dim}});
      if (options.qkv_bias)
        places[ours + "attention.qkv.bias"].push_back({attention(word) + ".bias", {count}});
    }
    places[ours + "attention.out.weight"] = {{attention("o") + ".weight", {dim, queries}}};
    places[ours + "gate_up.weight"] = {{gate("gate"), {ffn, dim}}, {gate("up"), {ffn, dim}}};
    places[ours + "down.weight"] = {{gate("down"), {dim, ffn}}};
  }
  places[cat(options.layers + 1, ".norm.weight")] = {{"model.norm.weight", {dim}}};
  if (!options.tied) places[head_name(options.layers)] = {{"lm_head.weight", {options.vocab, dim}}};
  return places;
}

// What is in the files besides, and is computed or the same.
bool is_needless(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq") || name == "lm_head.weight";
}

// The tensors of all files of a folder.
class Tensors {
 public:
  explicit Tensors(const Path& folder) : folder_(folder) {
    const Path index = folder / "model.safetensors.index.json";
    if (!std::filesystem::exists(index)) {
      add("model.safetensors");
      return;
    }
    std::set<std::string> names;
    try {
      for (const json all = json::parse(std::ifstream(index));
           const auto& file : all.at("weight_map"))
        names.insert(file.get<std::string>());
    } catch (const json::exception& error) {
      fail(Kind::Io, "'", index.string(), "' is no index of safetensors: ", error.what());
    }
    for (const auto& name : names) add(name);
  }
  const Path& folder() const { return folder_; }
  bool has(const std::string& name) const { return files_.contains(name); }
  at::Tensor get(const std::string& name) const { return files_.at(name)->tensor(name); }
  const auto& files() const { return files_; }

 private:
  void add(const std::string& name) {
    if (Path(name).has_parent_path())
      fail(Kind::Io, "the index in '", folder_.string(), "' names '", name, "', outside of it");
    const auto file = std::make_shared<checkpoint::SafetensorsFile>(folder_ / name);
    for (const auto& tensor : file->names()) files_[tensor] = file;
  }
  const Path folder_;
  std::map<std::string, std::shared_ptr<checkpoint::SafetensorsFile>> files_;  // by tensor
};

// Takes the places as the files have them: the language model of gpt2 puts a word before its names.
Init init_from(const Path& folder, Places places, bool mapped) {
  const auto tensors = std::make_shared<const Tensors>(folder);
  const std::string prefix = "transformer.";
  std::set<std::string> wanted;
  for (auto& [ours, parts] : places)
    for (auto& part : parts) {
      if (!tensors->has(part.name) && tensors->has(prefix + part.name))
        part.name = prefix + part.name;
      if (!tensors->has(part.name))
        fail(Kind::Io, "'", folder.string(), "' has no tensor '", part.name,
             "', which its config.json wants");
      const at::Tensor value = tensors->get(part.name);
      if (value.sizes() != at::IntArrayRef(part.shape))
        fail(Kind::Io, "'", folder.string(), "': '", part.name, "' is ", value.sizes(),
             ", and by config.json it is ", at::IntArrayRef(part.shape));
      if (!at::isFloatingType(value.scalar_type()))
        fail(Kind::Io, "'", folder.string(), "': '", part.name, "' is ",
             c10::toString(value.scalar_type()), ", and weights are of a floating type");
      wanted.insert(part.name);
    }
  for (const auto& [name, file] : tensors->files())
    if (!wanted.contains(name) && !is_needless(name))
      fail(Kind::Io, "'", folder.string(), "' has a tensor '", name,
           "' that such a model has no place for");
  return [tensors, mapped, places = std::move(places)](const std::string& name) {
    const auto found = places.find(name);
    YOKE_CHECK(found != places.end());
    std::vector<at::Tensor> values;
    for (const auto& part : found->second) {
      const at::Tensor value = tensors->get(part.name);
      values.push_back(part.transposed ? value.t() : value);
    }
    if (values.size() > 1) return at::cat(values);
    return mapped ? values[0] : values[0].clone();
  };
}

// config.json, whose keys are taken one by one. What is left and asks for something is refused.
class Settings {
 public:
  Settings(const std::string& text, std::string where) : where_(std::move(where)) {
    try {
      values_ = json::parse(text);
    } catch (const json::exception& error) {
      fail(Kind::Io, "'", where_, "' is no JSON: ", error.what());
    }
    if (!values_.is_object()) fail(Kind::Io, "'", where_, "' is no JSON object");
  }
  template <typename T>
  T take(const char* key, std::optional<T> usual = {}) {
    const json value = take_json(key);
    if (value.is_null() && usual) return *usual;
    try {
      return value.get<T>();
    } catch (const json::exception&) {
      fail(Kind::Io, "'", where_, "': ", key, " is ", value.is_null() ? "missing" : value.dump());
    }
  }
  json take_json(const char* key) {
    const auto found = values_.find(key);
    if (found == values_.end()) return nullptr;
    const json value = *found;
    values_.erase(found);
    return value;
  }
  void want(const char* key, std::initializer_list<json> allowed) {
    const json value = take_json(key);
    if (!value.is_null() && std::ranges::find(allowed, value) == allowed.end()) refuse(key, value);
  }
  void ignore(std::initializer_list<const char*> keys) {
    for (const char* key : keys) values_.erase(key);
  }
  void finish() const {
    for (const auto& [key, value] : values_.items())
      if (!value.is_null() && value != false && !(value.is_structured() && value.empty()))
        refuse(key, value);
  }
  [[noreturn]] void refuse(const std::string& key, const json& value) const {
    fail(Kind::Io, "'", where_, "' asks for ", key, " = ", value.dump(),
         ", which this model cannot do");
  }

 private:
  const std::string where_;
  json values_;
};

// Of training and generation there; the model is the same without.
void ignore_usual(Settings& settings) {
  settings.ignore({"_name_or_path",
                   "architectures",
                   "attention_dropout",
                   "attn_pdrop",
                   "bos_token_id",
                   "chunk_size_feed_forward",
                   "dtype",
                   "embd_pdrop",
                   "eos_token_id",
                   "gradient_checkpointing",
                   "id2label",
                   "initializer_range",
                   "label2id",
                   "n_ctx",
                   "pad_token_id",
                   "pretraining_tp",
                   "problem_type",
                   "resid_pdrop",
                   "return_dict",
                   "summary_activation",
                   "summary_first_dropout",
                   "summary_proj_to_labels",
                   "summary_type",
                   "summary_use_proj",
                   "task_specific_params",
                   "torch_dtype",
                   "transformers_version",
                   "use_cache",
                   "max_window_layers",
                   "sliding_window"});
}

GptOptions gpt_from(Settings& settings) {
  GptOptions options{.layers = settings.take<int64_t>("n_layer", 12),
                     .dim = settings.take<int64_t>("n_embd", 768),
                     .heads = settings.take<int64_t>("n_head", 12),
                     .vocab = settings.take<int64_t>("vocab_size", 50257),
                     .seq = settings.take<int64_t>("n_positions", 1024),
                     .ffn = settings.take<int64_t>("n_inner", 0)};
  settings.want("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  settings.want("layer_norm_epsilon", {1e-5});
  settings.want("scale_attn_weights", {true});
  settings.want("tie_word_embeddings", {true});
  return options;
}

parallel::RotaryOptions rotary_from(Settings& settings) {
  parallel::RotaryOptions rotary{.base = 10000};
  json scaling = settings.take_json("rope_parameters");  // of newer ones, with the base
  if (scaling.is_null()) scaling = settings.take_json("rope_scaling");
  rotary.base = settings.take<double>("rope_theta", 10000);
  if (scaling.is_null()) return rotary;
  const auto number = [&](const char* key, double usual) {
    return scaling.contains(key) && scaling[key].is_number() ? scaling[key].get<double>() : usual;
  };
  rotary.base = number("rope_theta", rotary.base);
  const std::string type =
      scaling.value("rope_type", scaling.value("type", std::string("default")));
  if (type == "default") return rotary;
  if (type != "llama3") settings.refuse("rope_type", type);
  rotary.factor = number("factor", 8);
  rotary.low = number("low_freq_factor", 1);
  rotary.high = number("high_freq_factor", 4);
  rotary.original = int64_t(number("original_max_position_embeddings", 8192));
  return rotary;
}

LlamaOptions llama_from(Settings& settings, bool is_qwen) {
  LlamaOptions options{.layers = settings.take<int64_t>("num_hidden_layers"),
                       .dim = settings.take<int64_t>("hidden_size"),
                       .heads = settings.take<int64_t>("num_attention_heads"),
                       .vocab = settings.take<int64_t>("vocab_size"),
                       .seq = settings.take<int64_t>("max_position_embeddings", 2048),
                       .kv_heads = settings.take<int64_t>("num_key_value_heads", 0),
                       .head_dim = settings.take<int64_t>("head_dim", 0),
                       .ffn = settings.take<int64_t>("intermediate_size"),
                       .tied = settings.take<bool>("tie_word_embeddings", false),
                       .qkv_bias = is_qwen,
                       .eps = settings.take<double>("rms_norm_eps", 1e-6),
                       .rotary = rotary_from(settings)};
  settings.want("hidden_act", {"silu"});
  settings.want("use_sliding_window", {false});
  if (const json kinds = settings.take_json("layer_types"); kinds.is_array())
    for (const auto& kind : kinds)
      if (kind != "full_attention") settings.refuse("layer_types", kind);
  return options;
}

json config_of(const GptOptions& options) {
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"n_layer", options.layers},
          {"n_embd", options.dim},
          {"n_head", options.heads},
          {"n_positions", options.seq},
          {"n_inner", options.ffn == 0 ? json(nullptr) : json(options.ffn)},
          {"vocab_size", options.vocab},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", 1e-5},
          {"tie_word_embeddings", true}};
}

json config_of(const LlamaOptions& options) {
  json config{{"model_type", options.qkv_bias ? "qwen2" : "llama"},
              {"architectures", {options.qkv_bias ? "Qwen2ForCausalLM" : "LlamaForCausalLM"}},
              {"num_hidden_layers", options.layers},
              {"hidden_size", options.dim},
              {"num_attention_heads", options.heads},
              {"num_key_value_heads", options.kv_heads == 0 ? options.heads : options.kv_heads},
              {"intermediate_size", options.ffn},
              {"vocab_size", options.vocab},
              {"max_position_embeddings", options.seq},
              {"hidden_act", "silu"},
              {"rms_norm_eps", options.eps},
              {"rope_theta", options.rotary.base},
              {"tie_word_embeddings", options.tied}};
  if (options.head_dim > 0) config["head_dim"] = options.head_dim;
  if (options.rotary.original > 0)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", options.rotary.factor},
                              {"low_freq_factor", options.rotary.low},
                              {"high_freq_factor", options.rotary.high},
                              {"original_max_position_embeddings", options.rotary.original}};
  return config;
}

}  // namespace

Model make_words(const WordsOptions& options) {
  const auto* gpt = std::get_if<GptOptions>(&options);
  return gpt ? make_gpt(*gpt) : make_llama(std::get<LlamaOptions>(options));
}

WordsOptions parse_config(const std::string& text, const std::string& where) {
  Settings settings(text, where);
  const auto type = settings.take<std::string>("model_type");
  ignore_usual(settings);
  WordsOptions options;
  if (type == "gpt2")
    options = gpt_from(settings);
  else if (type == "llama" || type == "qwen2")
    options = llama_from(settings, type == "qwen2");
  else
    fail(Kind::Io, "'", where, "' is of a model of the type '", type,
         "'; known are gpt2, llama and qwen2");
  settings.finish();
  return options;
}

std::string to_config(const WordsOptions& given) {
  return std::visit(
      [](auto options) {
        if constexpr (std::is_same_v<decltype(options), LlamaOptions>)
          if (options.ffn == 0) options.ffn = usual_ffn(options.dim);
        return config_of(options).dump(2) + "\n";
      },
      given);
}

WordsOptions read_hugging_face(const Path& folder, bool mapped) {
  const Path config = folder / "config.json";
  std::ifstream file(config);
  if (!file) fail(Kind::Io, "cannot read '", config.string(), "': it is no folder of a model");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  auto options = parse_config(text, config.string());
  std::visit([&](auto& chosen) { chosen.init = init_from(folder, places_of(chosen), mapped); },
             options);
  return options;
}

void write_hugging_face(const Path& folder, const WordsOptions& given, const Init& weights) {
  const auto options = parse_config(to_config(given), "config.json");  // every size is there
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  const std::string prefix = std::holds_alternative<GptOptions>(options) ? "transformer." : "";
  const auto places = std::visit([](const auto& chosen) { return places_of(chosen); }, options);
  for (const auto& [ours, parts] : places) {
    const at::Tensor whole = weights(ours);
    for (int64_t begin = 0; const auto& part : parts) {
      const int64_t count = part.transposed ? part.shape[1] : part.shape[0];
      const at::Tensor piece = whole.narrow(0, begin, count);
      tensors.emplace_back(prefix + part.name,
                           (part.transposed ? piece.t() : piece).contiguous().cpu());
      begin += count;
    }
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(Kind::Io, "cannot make '", folder.string(), "': ", error.message());
  checkpoint::write_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
  checkpoint::write_durably(folder / "config.json", to_config(options));
}

}  // namespace yoke::models
