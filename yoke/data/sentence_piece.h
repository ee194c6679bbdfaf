// SPDX-License-Identifier: Apache-2.0
// Tokenizers that SentencePiece trained: the .model file, read by its own library.
#pragma once

#include "yoke/data/tokenizer.h"

namespace yoke::data {

// `end`: the piece that ends a document, where it is not the one that the file names.
std::shared_ptr<const Tokenizer> open_sentence_piece(const std::filesystem::path& path,
                                                     const std::optional<std::string>& end);

}  // namespace yoke::data
