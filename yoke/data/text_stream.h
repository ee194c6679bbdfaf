// SPDX-License-Identifier: Apache-2.0
// Tokens that come one by one, as text: a character that is not yet complete is kept back.
#pragma once

#include "yoke/data/tokenizer.h"

namespace yoke::data {

class TextStream {
 public:
  explicit TextStream(std::shared_ptr<const Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)) {}
  std::string add(int64_t token);  // what is new
  std::string finish();            // what was kept back

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<int64_t> tokens_ = {};  // the last that were given out, and those after them
  size_t given_ = 0;                  // of these
};

}  // namespace yoke::data
