// SPDX-License-Identifier: Apache-2.0
// Models as Hugging Face's transformers keep them: a folder with config.json and safetensors. gpt2,
// llama (2 and 3) and qwen2. Whatever else a config asks for is an error that names it (Kind::Io),
// as is a tensor that is missing, has another shape, or has no place; nothing is half loaded.
#pragma once

#include <functional>
#include <string>
#include <variant>

#include "yoke/checkpoint/files.h"
#include "yoke/models/gpt.h"
#include "yoke/models/llama.h"

namespace yoke::models {

using WordsOptions = std::variant<GptOptions, LlamaOptions>;
Model make_words(const WordsOptions& options);

// With the sizes of the folder, and `init` that reads its weights. Seed, device, dtype and
// recompute are for the caller to set; `seq` too, where the samples are shorter than the model
// allows.
// `mapped`: weights are the pages of the file, and must not be written.
WordsOptions read_hugging_face(const checkpoint::Path& folder, bool mapped = false);

// config.json alone, without `init`; `where` is its name in errors.
std::string to_config(const WordsOptions& options);
WordsOptions parse_config(const std::string& text, const std::string& where);

// `weights` gives each parameter whole, by its name here. The folder is made if it is not there.
void write_hugging_face(const checkpoint::Path& folder, const WordsOptions& options,
                        const Init& weights);

}  // namespace yoke::models
