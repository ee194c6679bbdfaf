// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/error.h"
#include "yoke/data/sentence_piece.h"

namespace yoke::data {

std::shared_ptr<const Tokenizer> open_sentence_piece(const std::filesystem::path&,
                                                     const std::optional<std::string>&) {
  fail(Kind::Usage,
       "this yoke was built without SentencePiece, which a .model file wants: install "
       "libsentencepiece-dev and build again");
}

}  // namespace yoke::data
