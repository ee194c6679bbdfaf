// SPDX-License-Identifier: Apache-2.0
// Samples by number. Threads: all; nothing changes after it is opened.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "yoke/data/tokenizer.h"

namespace yoke::data {

constexpr int64_t kIgnored = -100;  // a target that does not count, as LibTorch has it

struct Batch {
  at::Tensor input = {}, target = {};  // [samples, ...]
  // Of packed text, [samples, tokens]: to which document of the sample a token belongs.
  at::Tensor documents = {};
  int64_t num_ignored = 0;  // targets
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples
  virtual Batch batch(const std::vector<int64_t>& samples) const = 0;
  // To learn from: samples may be changed by chance, which follows from their positions in the
  // endless row of epochs.
  virtual Batch draw(const std::vector<int64_t>& samples,
                     const std::vector<int64_t>& /*positions*/) const {
    return batch(samples);
  }
  virtual bool has_documents() const { return false; }  // in its batches
};

// The text of a file, or of the text files of a folder and those below it, in the order of their
// names, or of several, separated by commas: hidden ones and those with a zero byte are left out. A
// sample is `seq` tokens and the one after each. Throws Kind::Config where there are not two of
// them.
struct TextOptions {
  int64_t seq = 128;
  std::shared_ptr<const Tokenizer> tokenizer = byte_tokenizer();
  // Files are documents: after each comes the tokenizer's end, or a zero byte, and a token sees its
  // own document alone.
  bool documents = false;
};
std::shared_ptr<Dataset> open_text(const std::string& path, const TextOptions& options);
// Those files, and what is in one.
std::vector<std::string> text_files(const std::string& path);
std::string read_text(const std::string& file);
inline bool is_text(std::string_view content) { return content.find('\0') == content.npos; }
// Token numbers, as programs for preparing data write them: a .npy file of one dim (any integer), a
// .bin file of uint16, or of uint32 where `vocab` needs it, or a folder of such files in the order
// of their names. A sample is `seq` of one file's tokens and the one after each. Throws Kind::Io
// with file and offset where a number is not below `vocab`, when it is read. `end`: the token after
// each document, which then sees itself alone; -1: none.
std::shared_ptr<Dataset> open_tokens(const std::string& path, int64_t seq, int64_t vocab,
                                     int64_t end = -1);
// Words of a made-up language, in which each is likely to follow from the one before.
std::shared_ptr<Dataset> synthetic_words(int64_t vocab, int64_t seq, uint64_t seed);
// Vectors, and smooth functions of them.
std::shared_ptr<Dataset> synthetic_vectors(int64_t dim, uint64_t seed);
// Pictures with noise on them, and which of so many they are.
std::shared_ptr<Dataset> synthetic_images(int64_t channels, int64_t size, int64_t classes,
                                          uint64_t seed);
// Samples [begin, end) of another.
std::shared_ptr<Dataset> part_of(std::shared_ptr<Dataset> whole, int64_t begin, int64_t end);

// [samples, seq + 1] tokens as a batch; with `end` its documents too.
Batch batch_of_tokens(const at::Tensor& both, std::optional<int64_t> end);

}  // namespace yoke::data
