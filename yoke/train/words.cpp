// SPDX-License-Identifier: Apache-2.0
#include "yoke/train/words.h"

#include "yoke/base/error.h"
#include "yoke/data/text_stream.h"
#include "yoke/train/resolve.h"

namespace yoke::train {

Config config_of(const models::Opened& opened, std::vector<std::string> overrides) {
  if (opened.values.contains("config"))
    return parse_config(opened.values.at("config"), opened.folder.string(), overrides);
  overrides.push_back("model.init=" + opened.folder.string());
  return parse_config("", "the command line", overrides);
}

Words words_of(const models::Opened& opened, const std::string& tokenizer) {
  auto config = config_of(opened);
  if (!tokenizer.empty()) config.data.tokenizer = tokenizer;
  if (config.data.tokenizer.empty() && config.data.kind != "text")
    fail(Kind::Usage, "the model in '", opened.folder.string(), "' was not trained on text but on ",
         config.data.kind, "; give the tokenizer of its tokens by --tokenizer, or bytes");
  Words words{.tokenizer = open_tokenizer(config)};
  words.end = words.tokenizer->end();
  if (!words.end && config.data.documents)
    words.end = config.data.kind == "tokens" ? config.data.end : 0;
  return words;
}

Written write_text(const models::Whole& model, const Words& words, std::string_view prompt,
                   models::GenerateOptions options,
                   const std::function<bool(std::string_view)>& on_text) {
  options.end = words.end;
  auto tokens = words.tokenizer->encode(prompt);
  if (tokens.empty()) tokens = {words.end.value_or('\n')};
  data::TextStream stream(words.tokenizer);
  options.on_token = [&](int64_t token) {
    return on_text(token == words.end ? std::string() : stream.add(token));
  };
  Written written{.prompt_tokens = tokens.size()};
  written.tokens = models::generate(model, tokens, options);
  on_text(stream.finish());
  return written;
}

}  // namespace yoke::train
