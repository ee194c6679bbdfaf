// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/dataset.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"

namespace yoke::data {
namespace {

constexpr int64_t kSyntheticSize = 1 << 20;  // samples

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (!file && !file.eof()) fail(Kind::Io, "cannot read '", path.string(), "'");
  return text;
}

std::string read_all(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  if (!fs::exists(path))
    fail(Kind::Config, "data.path: there is no '", path.string(), "'; give a file or a folder");
  if (!fs::is_directory(path)) return read(path);
  std::vector<fs::path> files;
  for (auto entry = fs::recursive_directory_iterator(path); entry != fs::end(entry); ++entry) {
    if (entry->path().filename().string().starts_with(".")) {
      if (entry->is_directory()) entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      files.push_back(entry->path());
    }
  }
  std::ranges::sort(files);
  std::string all;
  for (const auto& file : files)
    if (const auto text = read(file); text.find('\0') == std::string::npos) all += text;
  return all;
}

class Text final : public Dataset {
 public:
  Text(const std::string& path, int64_t seq) : text_(read_all(path)), seq_(seq) {
    if (size() < 2)
      fail(Kind::Config, "data.path '", path, "' has ", text_.size(),
           " bytes of text, and a sample "
           "of model.seq = ",
           seq, " takes ", seq + 1, "; two are wanted at least");
  }
  int64_t size() const override { return (int64_t(text_.size()) - 1) / seq_; }
  Batch batch(const std::vector<int64_t>& samples) const override {
    const at::Tensor both = at::empty({int64_t(samples.size()), seq_ + 1}, at::kLong);
    auto* to = both.mutable_data_ptr<int64_t>();
    for (const int64_t sample : samples)
      for (int64_t i = 0; i <= seq_; ++i) *to++ = uint8_t(text_[size_t(sample * seq_ + i)]);
    return {both.narrow(1, 0, seq_).contiguous(), both.narrow(1, 1, seq_).contiguous()};
  }

 private:
  const std::string text_;
  const int64_t seq_;
};

class Words final : public Dataset {
 public:
  Words(int64_t vocab, int64_t seq, uint64_t seed) : vocab_(vocab), seq_(seq), seed_(seed) {}
  int64_t size() const override { return kSyntheticSize; }
  Batch batch(const std::vector<int64_t>& samples) const override {
    const at::Tensor both = at::empty({int64_t(samples.size()), seq_ + 1}, at::kLong);
    auto* to = both.mutable_data_ptr<int64_t>();
    for (const int64_t sample : samples) {
      const Rng rng(seed_, "words", uint64_t(sample));
      auto word = int64_t(rng.below(0, uint64_t(vocab_)));
      for (int64_t i = 0; i <= seq_; ++i, ++to) {
        *to = word;
        const bool follows = rng.uniform(uint64_t(2 * i + 1)) < 0.8f;
        word = follows ? (word * 5 + 3) % vocab_
                       : int64_t(rng.below(uint64_t(2 * i + 2), uint64_t(vocab_)));
      }
    }
    return {both.narrow(1, 0, seq_).contiguous(), both.narrow(1, 1, seq_).contiguous()};
  }

 private:
  const int64_t vocab_, seq_;
  const uint64_t seed_;
};

class Vectors final : public Dataset {
 public:
  Vectors(int64_t dim, uint64_t seed) : dim_(dim), seed_(seed) {}
  int64_t size() const override { return kSyntheticSize; }
  Batch batch(const std::vector<int64_t>& samples) const override {
    const at::Tensor x = at::empty({int64_t(samples.size()), dim_}, at::kFloat);
    auto* to = x.mutable_data_ptr<float>();
    for (const int64_t sample : samples) {
      const Rng rng(seed_, "vectors", uint64_t(sample));
      for (int64_t i = 0; i < dim_; ++i) *to++ = float(rng.normal(uint64_t(i)));
    }
    return {x, (x + x.roll(1, 1)).sin()};
  }

 private:
  const int64_t dim_;
  const uint64_t seed_;
};

class Some final : public Dataset {
 public:
  Some(std::shared_ptr<Dataset> whole, int64_t begin, int64_t end)
      : whole_(std::move(whole)), begin_(begin), end_(end) {
    if (begin < 0 || begin >= end || end > whole_->size())
      fail(Kind::Usage, "samples ", begin, " to ", end, " of ", whole_->size());
  }
  int64_t size() const override { return end_ - begin_; }
  Batch batch(const std::vector<int64_t>& samples) const override {
    auto moved = samples;
    for (auto& sample : moved) sample += begin_;
    return whole_->batch(moved);
  }

 private:
  const std::shared_ptr<Dataset> whole_;
  const int64_t begin_, end_;
};

}  // namespace

std::shared_ptr<Dataset> open_text(const std::string& path, int64_t seq) {
  return std::make_shared<Text>(path, seq);
}
std::shared_ptr<Dataset> synthetic_words(int64_t vocab, int64_t seq, uint64_t seed) {
  return std::make_shared<Words>(vocab, seq, seed);
}
std::shared_ptr<Dataset> synthetic_vectors(int64_t dim, uint64_t seed) {
  return std::make_shared<Vectors>(dim, seed);
}
std::shared_ptr<Dataset> part_of(std::shared_ptr<Dataset> whole, int64_t begin, int64_t end) {
  return std::make_shared<Some>(std::move(whole), begin, end);
}

}  // namespace yoke::data
