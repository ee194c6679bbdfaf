// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/tokenizer.h"

#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/base/mapped_file.h"
#include "yoke/base/text.h"
#include "yoke/data/sentence_piece.h"
#include "yoke/data/tokenizer_json.h"

namespace yoke::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Bytes final : public Tokenizer {
 public:
  int64_t vocab() const override { return 256; }
  std::vector<int64_t> encode(std::string_view text) const override {
    std::vector<int64_t> tokens(text.size());
    for (size_t i = 0; i < text.size(); ++i) tokens[i] = uint8_t(text[i]);
    return tokens;
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::string text;
    for (const int64_t token : tokens)
      if (token >= 0 && token < 256) text += char(token);
    return text;
  }
};

json read_json(const fs::path& path) {
  const MappedFile file(path);
  try {
    return json::parse(file.data(), file.data() + file.size());
  } catch (const json::exception& error) {
    fail(Kind::Io, "'", path.string(), "' is no JSON, or is cut short: ", error.what());
  }
}

// eos_token of tokenizer_config.json, which may be missing.
std::optional<std::string> end_of(const fs::path& folder) {
  const fs::path path = folder / "tokenizer_config.json";
  if (!fs::exists(path)) return {};
  const json all = read_json(path);
  json end = all.is_object() ? all.value("eos_token", json()) : json();
  if (end.is_object()) end = end.value("content", json());
  return end.is_string() ? std::optional(end.get<std::string>()) : std::nullopt;
}

// GPT-2's two files, as the tokenizer.json that they would be.
json gpt2_json(const fs::path& folder, const std::optional<std::string>& end) {
  const json vocab = read_json(folder / "vocab.json");
  const MappedFile file(folder / "merges.txt");
  json merges = json::array();
  for (auto& line : split({file.data(), file.size()}, '\n')) {
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty() && !line.starts_with("#version")) merges.push_back(std::move(line));
  }
  json added = json::array();
  const std::string last = end.value_or("<|endoftext|>");
  if (vocab.is_object() && vocab.contains(last))
    added.push_back({{"content", last}, {"id", vocab[last]}});
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}},
          {"pre_tokenizer", bytes},
          {"decoder", bytes},
          {"added_tokens", added}};
}

}  // namespace

Tokenizer::~Tokenizer() = default;
std::optional<int64_t> Tokenizer::end() const { return {}; }

std::shared_ptr<const Tokenizer> byte_tokenizer() { return std::make_shared<const Bytes>(); }

std::shared_ptr<const Tokenizer> open_tokenizer(const fs::path& path) {
  const std::string wanted =
      "give a tokenizer.json, a .model, or a folder with tokenizer.json, vocab.json and "
      "merges.txt, "
      "or tokenizer.model";
  if (path == "bytes") return byte_tokenizer();
  if (!fs::exists(path)) fail(Kind::Io, "there is no '", path.string(), "'; ", wanted);
  const bool is_folder = fs::is_directory(path);
  const auto end = end_of(is_folder ? path : path.parent_path());
  const auto has = [&](const char* name) { return is_folder && fs::exists(path / name); };
  if (has("tokenizer.json")) return open_tokenizer(path / "tokenizer.json");
  if (has("vocab.json") && has("merges.txt"))
    return tokenizer_from_json(gpt2_json(path, end), (path / "vocab.json").string(), end);
  if (has("tokenizer.model")) return open_tokenizer(path / "tokenizer.model");
  if (is_folder) fail(Kind::Io, "'", path.string(), "' has no tokenizer; ", wanted);
  if (path.extension() == ".model") return open_sentence_piece(path, end);
  if (path.extension() == ".json") return tokenizer_from_json(read_json(path), path.string(), end);
  fail(Kind::Io, "'", path.string(), "' is no tokenizer; ", wanted);
}

}  // namespace yoke::data
