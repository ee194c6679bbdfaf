// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/architecture.h"

#include <nlohmann/json.hpp>

#include "yoke/base/error.h"

namespace yoke::models {
namespace {

using nlohmann::json;

// One list of names for both ways.
template <typename Fn>
void fields(MlpOptions& options, const Fn& fn) {
  fn("layers", options.layers), fn("dim", options.dim), fn("ffn", options.ffn);
  fn("sample", options.sample), fn("classes", options.classes);
}
template <typename Fn>
void fields(ResnetOptions& options, const Fn& fn) {
  fn("depth", options.depth), fn("width", options.width), fn("channels", options.channels);
  fn("size", options.size), fn("classes", options.classes), fn("local", options.local);
}
template <typename Fn>
void fields(VitOptions& options, const Fn& fn) {
  fn("layers", options.layers), fn("dim", options.dim), fn("heads", options.heads);
  fn("ffn", options.ffn), fn("patch", options.patch), fn("channels", options.channels);
  fn("size", options.size), fn("classes", options.classes);
}
template <typename Fn>
void fields(ScriptOptions& options, const Fn& fn) {
  fn("path", options.path);
}

template <typename Options>
constexpr const char* kType = "";
template <>
constexpr const char* kType<MlpOptions> = "yoke-mlp";
template <>
constexpr const char* kType<ResnetOptions> = "yoke-resnet";
template <>
constexpr const char* kType<VitOptions> = "yoke-vit";
template <>
constexpr const char* kType<ScriptOptions> = "yoke-torchscript";

template <typename Options>
bool read(const json& text, std::optional<Architecture>& found) {
  if (text.at("model_type") != kType<Options>) return false;
  Options options;
  fields(options, [&](const char* name, auto& value) { text.at(name).get_to(value); });
  found = options;
  return true;
}

}  // namespace

Model make_model(const Architecture& architecture) {
  struct Make {
    Model operator()(const GptOptions& options) { return make_gpt(options); }
    Model operator()(const LlamaOptions& options) { return make_llama(options); }
    Model operator()(const MlpOptions& options) { return make_mlp(options); }
    Model operator()(const ResnetOptions& options) { return make_resnet(options); }
    Model operator()(const VitOptions& options) { return make_vit(options); }
    Model operator()(const ScriptOptions& options) { return make_script(options); }
  };
  return std::visit(Make(), architecture);
}

std::optional<WordsOptions> as_words(const Architecture& architecture) {
  if (const auto* gpt = std::get_if<GptOptions>(&architecture)) return *gpt;
  if (const auto* llama = std::get_if<LlamaOptions>(&architecture)) return *llama;
  return std::nullopt;
}
Architecture as_architecture(const WordsOptions& words) {
  return std::visit([](const auto& options) { return Architecture(options); }, words);
}

std::string to_json(const Architecture& architecture) {
  if (const auto words = as_words(architecture)) return to_config(*words);
  return std::visit(
      [](auto options) -> std::string {
        if constexpr (std::is_same_v<decltype(options), GptOptions> ||
                      std::is_same_v<decltype(options), LlamaOptions>) {
          return "";
        } else {
          json text{{"model_type", kType<decltype(options)>}};
          fields(options, [&](const char* name, const auto& value) { text[name] = value; });
          return text.dump(2) + "\n";
        }
      },
      architecture);
}

Architecture parse_architecture(const std::string& text, const std::string& where) {
  std::optional<Architecture> found;
  try {
    const json parsed = json::parse(text);
    if (read<MlpOptions>(parsed, found) || read<ResnetOptions>(parsed, found) ||
        read<VitOptions>(parsed, found) || read<ScriptOptions>(parsed, found))
      return *found;
  } catch (const std::exception& error) {
    fail(Kind::Io, "the architecture in '", where, "' cannot be read: ", error.what());
  }
  return as_architecture(parse_config(text, where));
}

}  // namespace yoke::models
