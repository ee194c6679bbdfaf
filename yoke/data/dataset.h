// SPDX-License-Identifier: Apache-2.0
// Samples by number. Threads: all; nothing changes after it is opened.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace yoke::data {

struct Batch {
  at::Tensor input = {}, target = {};  // [samples, ...]
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples
  virtual Batch batch(const std::vector<int64_t>& samples) const = 0;
};

// The bytes of a file, or of the text files of a folder and those below it, in the order of their
// names: hidden ones and those with a zero byte are left out. A sample is `seq` bytes and the byte
// after each. Throws Kind::Config where there are not two of them.
std::shared_ptr<Dataset> open_text(const std::string& path, int64_t seq);
// Token numbers, as programs for preparing data write them: a .npy file of one dim (any integer), a
// .bin file of uint16, or of uint32 where `vocab` needs it, or a folder of such files in the order
// of their names. A sample is `seq` of one file's tokens and the one after each. Throws Kind::Io
// with file and offset where a number is not below `vocab`, when it is read.
std::shared_ptr<Dataset> open_tokens(const std::string& path, int64_t seq, int64_t vocab);
// Words of a made-up language, in which each is likely to follow from the one before.
std::shared_ptr<Dataset> synthetic_words(int64_t vocab, int64_t seq, uint64_t seed);
// Vectors, and smooth functions of them.
std::shared_ptr<Dataset> synthetic_vectors(int64_t dim, uint64_t seed);
// Samples [begin, end) of another.
std::shared_ptr<Dataset> part_of(std::shared_ptr<Dataset> whole, int64_t begin, int64_t end);

}  // namespace yoke::data
