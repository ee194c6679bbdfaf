// SPDX-License-Identifier: Apache-2.0
// Text out of a trained model of words: with the tokenizer that it was trained with, a prompt goes
// in and text comes out, piece by piece.
#pragma once

#include <functional>
#include <string_view>

#include "yoke/data/tokenizer.h"
#include "yoke/models/generate.h"
#include "yoke/train/config.h"

namespace yoke::train {

// The config that the model was trained with; of a Hugging Face folder one that begins with it.
Config config_of(const models::Opened& opened, std::vector<std::string> overrides = {});

struct Words {
  std::shared_ptr<const data::Tokenizer> tokenizer = nullptr;
  std::optional<int64_t> end = {};  // the token that ends a text
};
// `tokenizer`, if it is not empty, instead of the model's own. Throws where there is none.
Words words_of(const models::Opened& opened, const std::string& tokenizer);

struct Written {
  size_t prompt_tokens = 0;
  std::vector<int64_t> tokens = {};
};
// `on_text` gets what is new after each token, which may be nothing; false from it ends the text.
Written write_text(const models::Whole& model, const Words& words, std::string_view prompt,
                   models::GenerateOptions options,
                   const std::function<bool(std::string_view)>& on_text);

}  // namespace yoke::train
