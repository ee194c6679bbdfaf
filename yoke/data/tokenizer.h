// SPDX-License-Identifier: Apache-2.0
// Text to token numbers and back, as Hugging Face's `tokenizers` and SentencePiece do it.
// Threads: all; nothing that shows changes after it is opened.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::data {

class Tokenizer {
 public:
  virtual ~Tokenizer();
  virtual int64_t vocab() const = 0;  // one above the highest token
  // Nothing is added before or after; special tokens written out in the text are recognised where
  // the peer does so. Bytes that are no UTF-8 count as U+FFFD.
  virtual std::vector<int64_t> encode(std::string_view text) const = 0;
  // Special tokens are written out. Numbers of no token give nothing, and bytes that are no UTF-8
  // give U+FFFD, so the tokens of half a character are better kept until the rest comes.
  virtual std::string decode(const std::vector<int64_t>& tokens) const = 0;
  // What ends a document, where it is known.
  virtual std::optional<int64_t> end() const;
};

std::shared_ptr<const Tokenizer> byte_tokenizer();  // the 256 bytes, whatever they are
// A tokenizer.json of the BPE kind, a .model of SentencePiece, or a folder with tokenizer.json,
// else vocab.json and merges.txt (GPT-2's), else tokenizer.model. tokenizer_config.json beside it
// says what ends a document. The word `bytes`: byte_tokenizer(). Throws Kind::Io for what it cannot
// read.
std::shared_ptr<const Tokenizer> open_tokenizer(const std::filesystem::path& path);

}  // namespace yoke::data
