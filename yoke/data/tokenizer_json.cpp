// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/tokenizer_json.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/data/added_tokens.h"
#include "yoke/data/bpe.h"
#include "yoke/data/normalize.h"
#include "yoke/data/pretokenize.h"
#include "yoke/data/utf8.h"

namespace yoke::data {
namespace {

using nlohmann::json;
using Pieces = std::vector<std::string>;

constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr int64_t kMaxToken = 1 << 24;                // higher numbers are a broken file's

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  if (from.empty()) return;
  std::string out;
  size_t begin = 0;
  for (size_t at = text.find(from); at != text.npos; at = text.find(from, begin)) {
    out.append(text, begin, at - begin).append(to);
    begin = at + from.size();
  }
  text = out.append(text, begin);
}

// A value with its file, for the errors.
struct Node {
  const json& value;
  const std::string& where;

  std::string type() const { return value.at("type").get<std::string>(); }
  bool flag(const char* key, bool usual) const {
    const auto found = value.find(key);
    return found == value.end() || found->is_null() ? usual : found->get<bool>();
  }
  std::string text(const char* key) const { return value.at(key).get<std::string>(); }
  [[noreturn]] void refuse(const std::string& what, const std::string& known) const {
    fail(Kind::Io, "'", where, "' has ", what, ", which yoke cannot do; it knows ", known);
  }
  // What a Replace or Split looks for, where it is no regular expression.
  std::string string_pattern(const char* what) const {
    const auto& pattern = value.at("pattern");
    if (!pattern.contains("String")) refuse(cat("a ", what, " of ", pattern.dump()), "strings");
    return pattern.at("String").get<std::string>();
  }
  // Itself, or the members of the sequence that it is; nothing if it is null.
  void each(const char* list, const std::function<void(const Node&)>& fn) const {
    if (value.is_null()) return;
    if (type() != "Sequence") return fn(*this);
    for (const auto& member : value.at(list)) Node{member, where}.each(list, fn);
  }
};

// One step of cutting text into words: it is changed, then cut.
struct Step {
  std::string space = {};   // instead of " "
  std::string prefix = {};  // put before a text without it
  bool only_first = false;  // only at the beginning of all
  std::optional<Splitter> splitter = {};
  bool keeps_matches = true, keeps_between = true;
};

using Normalize = std::function<void(std::string&)>;
using Decode = std::function<void(Pieces&)>;

std::vector<Normalize> normalizers_of(const Node& all) {
  std::vector<Normalize> steps;
  all.each("normalizers", [&](const Node& node) {
    static const std::pair<const char*, Form> kForms[] = {
        {"NFC", Form::Nfc}, {"NFD", Form::Nfd}, {"NFKC", Form::Nfkc}, {"NFKD", Form::Nfkd}};
    const std::string type = node.type();
    for (const auto& [name, form] : kForms)
      if (type == name)
        return steps.push_back(
            [to = form](std::string& text) { text = normalize(to, std::move(text)); });
    if (type == "Prepend")
      steps.push_back([what = node.text("prepend")](std::string& text) { text.insert(0, what); });
    else if (type == "Replace")
      steps.push_back([from = node.string_pattern("Replace"), to = node.text("content")](
                          std::string& text) { replace_all(text, from, to); });
    else
      node.refuse(cat("the normalizer '", type, "'"), "NFC, NFD, NFKC, NFKD, Prepend and Replace");
  });
  return steps;
}

// Metaspace's, in files of all ages.
std::string scheme_of(const Node& node) {
  if (node.value.contains("prepend_scheme")) return node.text("prepend_scheme");
  return node.flag("add_prefix_space", true) ? "always" : "never";
}

Step split_of(const Node& node) {
  const auto& pattern = node.value.at("pattern");
  const std::string behavior = node.text("behavior");
  const bool is_inverted = node.flag("invert", false);
  if (behavior != "Isolated" && behavior != "Removed")
    node.refuse(cat("a Split with the behavior '", behavior, "'"), "Isolated and Removed");
  Step step;
  step.splitter.emplace(pattern.contains("Regex") ? pattern.at("Regex").get<std::string>()
                                                  : "\\Q" + node.string_pattern("Split") + "\\E",
                        node.where);
  step.keeps_matches = behavior == "Isolated" || is_inverted;
  step.keeps_between = behavior == "Isolated" || !is_inverted;
  return step;
}

std::vector<Step> steps_of(const Node& all, bool& is_byte_level) {
  std::vector<Step> steps;
  all.each("pretokenizers", [&](const Node& node) {
    const std::string type = node.type();
    if (is_byte_level) node.refuse(cat("a ", type, " after ByteLevel"), "it as the last one");
    Step step;
    if (type == "ByteLevel") {
      is_byte_level = true;
      if (node.flag("add_prefix_space", true)) step.prefix = " ";
      if (node.flag("use_regex", true)) step.splitter.emplace(kGpt2Words, node.where);
    } else if (type == "Digits") {
      step.splitter.emplace(node.flag("individual_digits", false) ? "\\p{N}" : "\\p{N}+",
                            node.where);
    } else if (type == "Split") {
      step = split_of(node);
    } else if (type == "Metaspace") {
      step.space = node.text("replacement");
      const std::string scheme = scheme_of(node);
      if (scheme != "never") step.prefix = step.space;
      step.only_first = scheme == "first";
      if (node.flag("split", true))
        step.splitter.emplace(cat(step.space, "[^", step.space, "]*|[^", step.space, "]+"),
                              node.where);
    } else {
      node.refuse(cat("the pre-tokenizer '", type, "'"), "ByteLevel, Digits, Metaspace and Split");
    }
    steps.push_back(std::move(step));
  });
  return steps;
}

void decode_byte_level(Pieces& pieces) {
  std::string bytes, storage;
  for (const auto& piece : pieces) bytes += from_byte_alphabet(piece).value_or(piece);
  pieces = {std::string(valid_utf8(bytes, storage))};
}

void decode_byte_fallback(Pieces& pieces) {
  Pieces out;
  std::string bytes, storage;
  const auto finish = [&] {
    if (valid_utf8(bytes, storage) == bytes)
      out.push_back(bytes);
    else
      out.insert(out.end(), bytes.size(), kReplacement);
    bytes.clear();
  };
  for (auto& piece : pieces) {
    const bool is_byte = piece.size() == 6 && piece.starts_with("<0x") && piece[5] == '>' &&
                         std::isxdigit(uint8_t(piece[3])) != 0 &&
                         std::isxdigit(uint8_t(piece[4])) != 0;
    if (is_byte) {
      bytes += char(std::stoi(piece.substr(3, 2), nullptr, 16));
      continue;
    }
    finish();
    out.push_back(std::move(piece));
  }
  finish();
  pieces = std::move(out);
}

void strip(std::string& text, const std::string& what, int64_t at_start, int64_t at_end) {
  while (at_start-- > 0 && text.starts_with(what)) text.erase(0, what.size());
  while (at_end-- > 0 && text.ends_with(what)) text.erase(text.size() - what.size());
}

std::vector<Decode> decoders_of(const Node& all) {
  std::vector<Decode> steps;
  const auto for_each_piece = [&](std::function<void(std::string&)> fn) {
    steps.push_back([fn = std::move(fn)](Pieces& pieces) { std::ranges::for_each(pieces, fn); });
  };
  all.each("decoders", [&](const Node& node) {
    const std::string type = node.type();
    if (type == "ByteLevel") {
      steps.push_back(decode_byte_level);
    } else if (type == "ByteFallback") {
      steps.push_back(decode_byte_fallback);
    } else if (type == "Fuse") {
      steps.push_back([](Pieces& pieces) {
        std::string text;
        for (const auto& piece : pieces) text += piece;
        pieces = {text};
      });
    } else if (type == "Replace") {
      for_each_piece([from = node.string_pattern("Replace"), to = node.text("content")](
                         std::string& text) { replace_all(text, from, to); });
    } else if (type == "Strip") {
      for_each_piece([what = node.text("content"), start = node.value.at("start").get<int64_t>(),
                      stop = node.value.at("stop").get<int64_t>()](std::string& text) {
        strip(text, what, start, stop);
      });
    } else if (type == "Metaspace") {
      // The peer drops every such sign of the first token, not just the first.
      steps.push_back(
          [space = node.text("replacement"), drops = scheme_of(node) != "never"](Pieces& pieces) {
            for (auto& piece : pieces)
              replace_all(piece, space, drops && &piece == &pieces[0] ? "" : " ");
          });
    } else {
      node.refuse(cat("the decoder '", type, "'"),
                  "ByteFallback, ByteLevel, Fuse, Metaspace, Replace and Strip");
    }
  });
  return steps;
}

std::pair<std::string, std::string> merge_of(const json& merge, const std::string& where) {
  if (merge.is_array() && merge.size() == 2) return {merge[0], merge[1]};
  const std::string text = merge.is_string() ? merge.get<std::string>() : "";
  const size_t space = text.find(' ');
  if (space == text.npos || text.find(' ', space + 1) != text.npos)
    fail(Kind::Io, "'", where, "': the merge ", merge.dump(), " is not two tokens");
  return {text.substr(0, space), text.substr(space + 1)};
}

// The options that ask for something else than what is done here.
void check_model(const Node& model) {
  const std::string known = "BPE as GPT-2, Llama and Qwen have it";
  if (const std::string type = model.value.value("type", "BPE"); type != "BPE")
    model.refuse(
        cat("a model of the kind '", type, "'"),
        cat("BPE", type == "Unigram" ? "; give the tokenizer.model of SentencePiece" : ""));
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
    if (const json value = model.value.value(key, json());
        !value.is_null() && value != "" && value != 0.0)
      model.refuse(cat(key, " = ", value.dump()), known);
}

class TokenizerJson final : public Tokenizer {
 public:
  TokenizerJson(const json& all, const std::string& where, const std::optional<std::string>& end) {
    const auto node = [&](const char* key) {
      static const json kNone;
      return Node{all.contains(key) ? all.at(key) : kNone, where};
    };
    const Node model{all.at("model"), where};
    check_model(model);
    normalizers_ = normalizers_of(node("normalizer"));
    bool is_byte_level = false;
    steps_ = steps_of(node("pre_tokenizer"), is_byte_level);
    decoders_ = decoders_of(node("decoder"));
    read_model(model, is_byte_level);
    for (const auto& added : node("added_tokens").value) read_added({added, where});
    for (const char* name :
         {"<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<eos>"})
      if (!end_ && !end) end_ = token_of(name);
    if (end && !(end_ = token_of(*end)))
      fail(Kind::Io, "'", where, "' has no token '", *end,
           "', which tokenizer_config.json beside it names as eos_token");
  }

  int64_t vocab() const override { return int64_t(pieces_.size()); }
  std::optional<int64_t> end() const override { return end_; }

  std::vector<int64_t> encode(std::string_view given) const override {
    if (given.size() >> 31 != 0)
      fail(Kind::Usage, "a text of ", given.size(), " bytes at a time; give at most 2 GiB");
    std::string storage, changed;
    const std::string_view text = valid_utf8(given, storage);
    std::vector<int64_t> tokens;
    const auto add = [&](int64_t token) { tokens.push_back(token); };
    auto scratch = bpe_->take();
    added_.cut(text, add, [&](std::string_view section) {
      const bool is_first = section.data() == text.data();
      if (!normalizers_.empty()) {
        changed = section;
        for (const auto& step : normalizers_) step(changed);
        section = changed;
      }
      normalized_added_.cut(section, add, [&](std::string_view part) {
        encode(0, part, is_first && part.data() == section.data(), *scratch, tokens);
      });
    });
    bpe_->give_back(std::move(scratch));
    return tokens;
  }

  std::string decode(const std::vector<int64_t>& tokens) const override {
    Pieces pieces;
    for (const int64_t token : tokens)
      if (token >= 0 && token < vocab() && !pieces_[size_t(token)].empty())
        pieces.push_back(pieces_[size_t(token)]);
    for (const auto& step : decoders_) step(pieces);
    std::string text;
    for (const auto& piece : pieces) {
      if (decoders_.empty() && !text.empty()) text += ' ';
      text += piece;
    }
    return text;
  }

 private:
  void read_model(const Node& model, bool is_byte_level) {
    BpeOptions options{.byte_level = is_byte_level,
                       .byte_fallback = model.flag("byte_fallback", false),
                       .fuse_unknown = model.flag("fuse_unk", false),
                       .ignore_merges = model.flag("ignore_merges", false)};
    // What is not in the alphabet cannot come of bytes; it may still be an added token.
    const auto bytes_of = [&](const std::string& piece) {
      return is_byte_level ? from_byte_alphabet(piece) : piece;
    };
    for (const auto& [piece, token] : model.value.at("vocab").items()) {
      set_piece({token, model.where}, token, piece);
      tokens_[piece] = token;
      if (const auto bytes = bytes_of(piece)) options.vocab[*bytes] = token;
    }
    for (const auto& merge : model.value.at("merges")) {
      auto [left, right] = merge_of(merge, model.where);
      options.merges.emplace_back(bytes_of(left).value_or(left), bytes_of(right).value_or(right));
    }
    if (const json unknown = model.value.value("unk_token", json()); !unknown.is_null()) {
      const auto token = token_of(unknown);
      if (token) options.unknown = int32_t(*token);
    }
    bpe_.emplace(std::move(options), model.where);
  }

  void read_added(const Node& node) {
    AddedToken added{.content = node.text("content"),
                     .token = node.value.at("id"),
                     .lstrip = node.flag("lstrip", false),
                     .rstrip = node.flag("rstrip", false)};
    if (node.flag("single_word", false))
      node.refuse(cat("the added token '", added.content, "' with single_word"), "those without");
    set_piece(node, added.token, added.content);
    if (added.content.empty()) return;
    tokens_[added.content] = added.token;
    const bool is_normalized = node.flag("normalized", false);
    if (is_normalized)
      for (const auto& step : normalizers_) step(added.content);
    (is_normalized ? normalized_added_ : added_).add(std::move(added));
  }

  void set_piece(const Node& node, int64_t token, const std::string& piece) {
    if (token < 0 || token > kMaxToken)
      fail(Kind::Io, "'", node.where, "': the token '", piece, "' has the number ", token);
    if (token >= vocab()) pieces_.resize(size_t(token) + 1);
    pieces_[size_t(token)] = piece;
  }

  std::optional<int64_t> token_of(const std::string& piece) const {
    const auto found = tokens_.find(piece);
    return found == tokens_.end() ? std::nullopt : std::optional(found->second);
  }

  void encode(size_t number, std::string_view text, bool is_first, Bpe::Scratch& scratch,
              std::vector<int64_t>& tokens) const {
    if (number == steps_.size()) return bpe_->encode(text, scratch, tokens);
    const Step& step = steps_[number];
    std::string changed;
    if (!step.space.empty()) {
      changed = text;
      replace_all(changed, " ", step.space);
      text = changed;
    }
    if (!text.starts_with(step.prefix) && (is_first || !step.only_first)) {
      changed = step.prefix + std::string(text);
      text = changed;
    }
    if (!step.splitter) return encode(number + 1, text, is_first, scratch, tokens);
    step.splitter->split(text, [&](std::string_view part, bool is_match) {
      if (is_match ? step.keeps_matches : step.keeps_between)
        encode(number + 1, part, is_first && part.data() == text.data(), scratch, tokens);
    });
  }

  Pieces pieces_;  // by token, as the file writes them; empty: no token
  std::unordered_map<std::string, int64_t> tokens_;
  AddedTokens added_, normalized_added_;
  std::vector<Normalize> normalizers_;
  std::vector<Step> steps_;
  std::vector<Decode> decoders_;
  std::optional<Bpe> bpe_;
  std::optional<int64_t> end_;
};

}  // namespace

std::shared_ptr<const Tokenizer> tokenizer_from_json(const json& all, const std::string& where,
                                                     const std::optional<std::string>& end) {
  try {
    return std::make_shared<const TokenizerJson>(all, where, end);
  } catch (const json::exception& error) {
    fail(Kind::Io, "'", where, "' is no tokenizer of Hugging Face's: ", error.what());
  }
}

}  // namespace yoke::data
