// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/text_stream.h"

namespace yoke::data {
namespace {

// Whether it ends within a character, or with what stands for one that is not complete.
bool is_torn(const std::string& text) {
  if (text.ends_with("\xEF\xBF\xBD")) return true;
  size_t i = text.size(), follow = 0;
  while (i > 0 && (uint8_t(text[i - 1]) & 0xC0) == 0x80 && follow < 3) --i, ++follow;
  if (i == 0) return false;
  const auto lead = uint8_t(text[i - 1]);
  const size_t wanted = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC0 ? 1 : 0;
  return follow < wanted;
}

}  // namespace

std::string TextStream::add(int64_t token) {
  tokens_.push_back(token);
  // With the tokens before: some tokenizers drop a space at a beginning.
  const std::string before = tokenizer_->decode({tokens_.begin(), tokens_.begin() + long(given_)});
  const std::string all = tokenizer_->decode(tokens_);
  if (is_torn(all) && tokens_.size() - given_ < 8) return "";
  tokens_.erase(tokens_.begin(), tokens_.begin() + long(given_));
  given_ = tokens_.size();
  return all.size() > before.size() ? all.substr(before.size()) : "";
}

std::string TextStream::finish() {
  const std::string before = tokenizer_->decode({tokens_.begin(), tokens_.begin() + long(given_)});
  const std::string all = tokenizer_->decode(tokens_);
  tokens_.clear();
  given_ = 0;
  return all.size() > before.size() ? all.substr(before.size()) : "";
}

}  // namespace yoke::data
