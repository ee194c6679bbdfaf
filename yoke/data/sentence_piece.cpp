// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/sentence_piece.h"

#include <sentencepiece_processor.h>

#include "yoke/base/error.h"
#include "yoke/base/mapped_file.h"
#include "yoke/data/utf8.h"

namespace yoke::data {
namespace {

class SentencePiece final : public Tokenizer {
 public:
  SentencePiece(const std::filesystem::path& path, const std::optional<std::string>& end) {
    const MappedFile file(path);
    if (!model_.LoadFromSerializedProto({file.data(), file.size()}).ok())
      fail(Kind::Io, "'", path.string(), "' (", file.size(),
           " bytes) is no model of SentencePiece, or is cut short; get it again");
    end_ = end ? model_.PieceToId(*end) : model_.eos_id();
    if (end && model_.IsUnknown(end_))
      fail(Kind::Io, "'", path.string(), "' has no token '", *end,
           "', which tokenizer_config.json beside it names as eos_token");
  }
  int64_t vocab() const override { return model_.GetPieceSize(); }
  std::vector<int64_t> encode(std::string_view given) const override {
    std::string storage;
    const std::string_view text = valid_utf8(given, storage);
    std::vector<int> ids;
    check(model_.Encode({text.data(), text.size()}, &ids));
    return {ids.begin(), ids.end()};
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::vector<int> ids;
    for (const int64_t token : tokens)
      if (token >= 0 && token < vocab()) ids.push_back(int(token));
    std::string text;
    check(model_.Decode(ids, &text));
    return text;
  }
  std::optional<int64_t> end() const override {
    return end_ < 0 ? std::nullopt : std::optional<int64_t>(end_);
  }

 private:
  static void check(const sentencepiece::util::Status& status) {
    if (!status.ok()) fail(Kind::Io, "SentencePiece failed: ", status.ToString());
  }
  sentencepiece::SentencePieceProcessor model_;
  int end_ = -1;
};

}  // namespace

std::shared_ptr<const Tokenizer> open_sentence_piece(const std::filesystem::path& path,
                                                     const std::optional<std::string>& end) {
  return std::make_shared<const SentencePiece>(path, end);
}

}  // namespace yoke::data
