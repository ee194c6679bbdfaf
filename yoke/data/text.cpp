// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/data/dataset.h"

namespace yoke::data {
namespace {

namespace fs = std::filesystem;

class Text final : public Dataset {
 public:
  Text(const std::string& path, const TextOptions& options) : seq_(options.seq) {
    const bool is_bytes = options.tokenizer->vocab() == 256 && !options.tokenizer->end();
    if (options.documents && !is_bytes && !options.tokenizer->end())
      fail(Kind::Config,
           "data.documents: the tokenizer does not say what ends a document; its "
           "tokenizer_config.json may by eos_token");
    if (options.documents) end_ = options.tokenizer->end().value_or(0);
    for (const auto& file : text_files(path)) {
      const std::string text = read_text(file);
      if (!is_text(text)) continue;
      if (is_bytes)  // without the way over numbers of 64 bits
        for (const char c : text) tokens_.push_back(uint8_t(c));
      else
        for (const int64_t token : options.tokenizer->encode(text))
          tokens_.push_back(uint32_t(token));
      if (end_ && !text.empty()) tokens_.push_back(uint32_t(*end_));
    }
    tokens_.shrink_to_fit();
    if (size() < 2)
      fail(Kind::Config, "data.path '", path, "' has ", tokens_.size(),
           " tokens of text, and a sample of model.seq = ", seq_, " takes ", seq_ + 1,
           "; two are wanted at least");
  }
  int64_t size() const override { return (int64_t(tokens_.size()) - 1) / seq_; }
  Batch batch(const std::vector<int64_t>& samples) const override {
    const at::Tensor both = at::empty({int64_t(samples.size()), seq_ + 1}, at::kLong);
    auto* to = both.mutable_data_ptr<int64_t>();
    for (const int64_t sample : samples)
      to = std::copy_n(tokens_.begin() + sample * seq_, seq_ + 1, to);
    return batch_of_tokens(both, end_);
  }
  bool has_documents() const override { return end_.has_value(); }

 private:
  const int64_t seq_;
  std::optional<int64_t> end_ = {};
  std::vector<uint32_t> tokens_ = {};
};

}  // namespace

std::vector<std::string> text_files(const std::string& path) {
  if (!fs::exists(path) && path.find(',') != path.npos) {
    std::vector<std::string> all;
    for (const auto& one : split(path, ','))
      for (auto& file : text_files(one)) all.push_back(std::move(file));
    return all;
  }
  if (!fs::exists(path))
    fail(Kind::Config, "data.path: there is no '", path, "'; give a file or a folder");
  if (!fs::is_directory(path)) return {path};
  std::vector<std::string> files;
  for (auto entry = fs::recursive_directory_iterator(path); entry != fs::end(entry); ++entry) {
    if (entry->path().filename().string().starts_with(".")) {
      if (entry->is_directory()) entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      files.push_back(entry->path().string());
    }
  }
  std::ranges::sort(files);
  return files;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (!file && !file.eof()) fail(Kind::Io, "cannot read '", path, "'");
  return text;
}

std::shared_ptr<Dataset> open_text(const std::string& path, const TextOptions& options) {
  return std::make_shared<Text>(path, options);
}

}  // namespace yoke::data
