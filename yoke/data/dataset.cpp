// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/dataset.h"

#include <ATen/Functions.h>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"

namespace yoke::data {
namespace {

constexpr int64_t kSyntheticSize = 1 << 20;  // samples

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
    return batch_of_tokens(both, std::nullopt);
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

class Pictures final : public Dataset {
 public:
  Pictures(int64_t channels, int64_t size, int64_t classes, uint64_t seed)
      : shape_{channels, size, size}, classes_(classes), seed_(seed) {}
  int64_t size() const override { return kSyntheticSize; }
  Batch batch(const std::vector<int64_t>& samples) const override {
    const int64_t count = shape_[0] * shape_[1] * shape_[2];
    const at::Tensor x = at::empty({int64_t(samples.size()), count}, at::kFloat);
    const at::Tensor y = at::empty({int64_t(samples.size())}, at::kLong);
    auto* to = x.mutable_data_ptr<float>();
    for (size_t s = 0; s < samples.size(); ++s) {
      const Rng rng(seed_, "pictures", uint64_t(samples[s]));
      const auto which = rng.below(uint64_t(count), uint64_t(classes_));
      const Rng picture(seed_, "picture", which);
      y[int64_t(s)] = int64_t(which);
      for (int64_t i = 0; i < count; ++i)
        *to++ = float(picture.normal(uint64_t(i)) + rng.normal(uint64_t(i)));
    }
    return {x.view({-1, shape_[0], shape_[1], shape_[2]}), y};
  }

 private:
  const std::vector<int64_t> shape_;
  const int64_t classes_;
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
    return whole_->batch(moved(samples));
  }
  Batch draw(const std::vector<int64_t>& samples,
             const std::vector<int64_t>& positions) const override {
    return whole_->draw(moved(samples), positions);
  }
  bool has_documents() const override { return whole_->has_documents(); }

 private:
  std::vector<int64_t> moved(std::vector<int64_t> samples) const {
    for (auto& sample : samples) sample += begin_;
    return samples;
  }
  const std::shared_ptr<Dataset> whole_;
  const int64_t begin_, end_;
};

}  // namespace

Batch batch_of_tokens(const at::Tensor& both, std::optional<int64_t> end) {
  const int64_t seq = both.size(1) - 1;
  Batch batch{both.narrow(1, 0, seq).contiguous(), both.narrow(1, 1, seq).contiguous()};
  if (!end) return batch;
  // What comes after an end belongs to the next one, and nothing tells what it is.
  const at::Tensor is_end = batch.input == *end;
  batch.documents = is_end.cumsum(1) - is_end.to(at::kLong);
  batch.target = batch.target.masked_fill(is_end, kIgnored);  // a new one: it may share memory
  batch.num_ignored = is_end.sum().item<int64_t>();
  return batch;
}

std::shared_ptr<Dataset> synthetic_words(int64_t vocab, int64_t seq, uint64_t seed) {
  return std::make_shared<Words>(vocab, seq, seed);
}
std::shared_ptr<Dataset> synthetic_vectors(int64_t dim, uint64_t seed) {
  return std::make_shared<Vectors>(dim, seed);
}
std::shared_ptr<Dataset> synthetic_images(int64_t channels, int64_t size, int64_t classes,
                                          uint64_t seed) {
  return std::make_shared<Pictures>(channels, size, classes, seed);
}
std::shared_ptr<Dataset> part_of(std::shared_ptr<Dataset> whole, int64_t begin, int64_t end) {
  return std::make_shared<Some>(std::move(whole), begin, end);
}

}  // namespace yoke::data
