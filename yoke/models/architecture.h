// SPDX-License-Identifier: Apache-2.0
// Which model it is, with every size, as a checkpoint keeps it: JSON, that of gpt and llama as
// Hugging Face's config.json has it.
#pragma once

#include "yoke/models/hugging_face.h"
#include "yoke/models/mlp.h"
#include "yoke/models/resnet.h"
#include "yoke/models/script.h"
#include "yoke/models/vit.h"

namespace yoke::models {

using Architecture =
    std::variant<GptOptions, LlamaOptions, MlpOptions, ResnetOptions, VitOptions, ScriptOptions>;

Model make_model(const Architecture& architecture);

std::string to_json(const Architecture& architecture);
// `where` is its name in errors, which are Kind::Io.
Architecture parse_architecture(const std::string& text, const std::string& where);

// Of gpt and llama; else none.
std::optional<WordsOptions> as_words(const Architecture& architecture);
Architecture as_architecture(const WordsOptions& words);

}  // namespace yoke::models
