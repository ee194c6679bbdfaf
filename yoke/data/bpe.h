// SPDX-License-Identifier: Apache-2.0
// Byte pair encoding of one word: it begins as its bytes or characters, and of all neighbours that
// have a merge, those with the earliest merge become one, the leftmost first, until none has.
// Threads: all.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "yoke/base/mutex.h"

namespace yoke::data {

struct BpeOptions {
  std::unordered_map<std::string, int32_t> vocab = {};
  std::vector<std::pair<std::string, std::string>> merges = {};
  std::optional<int32_t> unknown = {};  // for what is not in the vocabulary; else it is left out
  bool byte_level = false;              // words begin as bytes, not as characters of UTF-8
  bool byte_fallback = false;           // "<0x41>" and its like for unknown characters
  bool fuse_unknown = false;            // one token for a row of them
  bool ignore_merges = false;           // for words that are in the vocabulary
};

class Bpe {
 public:
  // Throws Kind::Io, naming `where`, for a merge whose parts or result are not in the vocabulary.
  Bpe(BpeOptions options, const std::string& where);

  // What one caller at a time needs besides: words met lately, and room. Taken for a text, not for
  // a word.
  struct Scratch;
  std::shared_ptr<Scratch> take() const;
  void give_back(std::shared_ptr<Scratch> scratch) const;
  void encode(std::string_view word, Scratch& scratch, std::vector<int64_t>& to) const;

 private:
  struct Merge {
    uint64_t pair = 0;  // the two tokens
    uint32_t rank = 0;
    int32_t result = 0;
  };
  const Merge& find(int32_t left, int32_t right) const;
  void begin(std::string_view word, std::vector<int32_t>& tokens) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  const BpeOptions options_;
  std::array<int32_t, 256> single_ = {};    // tokens of one byte, or -1
  std::array<int32_t, 256> fallback_ = {};  // likewise
  std::vector<Merge> merges_;               // a hash table with free places
  mutable Mutex mutex_;
  mutable std::vector<std::shared_ptr<Scratch>> idle_ YOKE_GUARDED_BY(mutex_);
};

// GPT-2's alphabet writes each byte as a printable character. Nothing if some character is not in
// it.
std::optional<std::string> from_byte_alphabet(std::string_view text);

}  // namespace yoke::data
