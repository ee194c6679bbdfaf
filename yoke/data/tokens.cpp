// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <regex>

#include "yoke/base/error.h"
#include "yoke/base/mapped_file.h"
#include "yoke/base/text.h"
#include "yoke/data/dataset.h"

namespace yoke::data {
namespace {

namespace fs = std::filesystem;

// One file of tokens.
class Shard {
 public:
  Shard(const fs::path& path, int64_t vocab) : file_(path), vocab_(vocab) {
    if (path.extension() == ".npy")
      read_header();
    else
      width_ = vocab > (1 << 16) ? 4 : 2;
    const size_t bytes = file_.size() - begin_;
    if (bytes % size_t(width_) != 0)
      fail(Kind::Io, "'", path.string(), "' ends in the middle of a token: its ", bytes,
           " bytes from offset ", begin_, " on are not a multiple of ", width_);
    if (declared_ >= 0 && declared_ != size())
      fail(Kind::Io, "'", path.string(), "' should have ", declared_, " tokens and has ", size());
  }
  int64_t size() const { return int64_t(file_.size() - begin_) / width_; }
  void read(int64_t first, int64_t count, int64_t* to) const {
    const char* from = file_.data() + begin_ + first * width_;
    const auto copy = [&](auto kind) {
      for (int64_t i = 0; i < count; ++i) {
        auto value = kind;
        std::memcpy(&value, from + i * int64_t(sizeof value), sizeof value);
        to[i] = int64_t(value);
      }
    };
    if (is_signed_)
      width_ == 8 ? copy(int64_t{}) : width_ == 4 ? copy(int32_t{}) : copy(int16_t{});
    else
      width_ == 4 ? copy(uint32_t{}) : width_ == 2 ? copy(uint16_t{}) : copy(uint8_t{});
    for (int64_t i = 0; i < count; ++i)
      if (to[i] < 0 || to[i] >= vocab_)
        fail(Kind::Io, "'", file_.path().string(), "' has the token ", to[i], " at byte ",
             int64_t(begin_) + (first + i) * width_, ", and the model knows ", vocab_);
  }

 private:
  // NumPy's: eight bytes, the length of a header, and the header, a Python dictionary.
  void read_header() {
    const std::string text(file_.data(), std::min<size_t>(file_.size(), 1 << 16));
    const auto bad = [&](const std::string& why) {
      fail(Kind::Io, "'", file_.path().string(), "' is no .npy file of tokens: ", why);
    };
    if (!text.starts_with("\x93NUMPY") || text.size() < 12) bad("it does not begin like one");
    const bool is_first = text[6] == 1;  // of its versions
    const auto byte = [&](size_t i) { return size_t(uint8_t(text[i])); };
    const size_t length = is_first ? byte(8) | byte(9) << 8
                                   : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
    begin_ = (is_first ? 10 : 12) + length;
    if (begin_ > text.size()) bad("its header ends beyond it");
    const std::string header = text.substr(is_first ? 10 : 12, length);
    std::smatch match;
    if (!std::regex_search(header, match, std::regex("'descr': '[<|]([ui])([1248])'")))
      bad(cat("it wants integers, and has ", header));
    is_signed_ = match[1] == "i";
    width_ = match[2].str()[0] - '0';
    if (is_signed_ ? width_ == 1 : width_ == 8)
      bad(cat("it wants u1, u2, u4, i2, i4 or i8: ", header));
    if (!std::regex_search(header, match, std::regex("'shape': \\(([0-9]+),?\\)")))
      bad(cat("it wants one dim, and has ", header));
    declared_ = parse_int(match[1].str()).value_or(-1);
  }

  const MappedFile file_;
  const int64_t vocab_;
  size_t begin_ = 0;
  int64_t width_ = 2, declared_ = -1;
  bool is_signed_ = false;
};

std::vector<fs::path> files_of(const std::string& path) {
  if (!fs::exists(path))
    fail(Kind::Config, "data.path: there is no '", path,
         "'; give a .bin or .npy file, or a folder");
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path))
    if (const auto kind = entry.path().extension(); kind == ".bin" || kind == ".npy")
      files.push_back(entry.path());
  std::ranges::sort(files);
  if (files.empty()) fail(Kind::Config, "data.path: '", path, "' has no .bin and no .npy file");
  return files;
}

class Tokens final : public Dataset {
 public:
  Tokens(const std::string& path, int64_t seq, int64_t vocab, int64_t end) : seq_(seq) {
    if (end >= 0) end_ = end;
    for (const auto& file : files_of(path)) {
      shards_.push_back(std::make_unique<Shard>(file, vocab));
      ends_.push_back(size() + std::max<int64_t>(0, (shards_.back()->size() - 1) / seq));
    }
    if (size() < 2)
      fail(Kind::Config, "data.path '", path, "' has ", size(), " samples of model.seq = ", seq,
           " tokens and the one after; two are wanted at least");
  }
  int64_t size() const override { return ends_.empty() ? 0 : ends_.back(); }
  Batch batch(const std::vector<int64_t>& samples) const override {
    const at::Tensor both = at::empty({int64_t(samples.size()), seq_ + 1}, at::kLong);
    auto* to = both.mutable_data_ptr<int64_t>();
    for (const int64_t sample : samples) {
      const auto shard = size_t(std::ranges::upper_bound(ends_, sample) - ends_.begin());
      const int64_t first = sample - (shard == 0 ? 0 : ends_[shard - 1]);
      shards_[shard]->read(first * seq_, seq_ + 1, to);
      to += seq_ + 1;
    }
    return batch_of_tokens(both, end_);
  }
  bool has_documents() const override { return end_.has_value(); }

 private:
  const int64_t seq_;
  std::optional<int64_t> end_ = {};
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<int64_t> ends_;  // samples up to the end of each
};

}  // namespace

std::shared_ptr<Dataset> open_tokens(const std::string& path, int64_t seq, int64_t vocab,
                                     int64_t end) {
  return std::make_shared<Tokens>(path, seq, vocab, end);
}

}  // namespace yoke::data
