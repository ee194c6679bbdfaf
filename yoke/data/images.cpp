// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/images.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <iomanip>

#include "yoke/base/error.h"
#include "yoke/base/mapped_file.h"
#include "yoke/base/rng.h"
#include "yoke/data/image_file.h"

namespace yoke::data {
namespace {

namespace fs = std::filesystem;

// Which numbers of a stream decide what. uniform() takes one word of Philox and below() two: these
// have no word in common.
constexpr uint64_t kFlip = 0, kTop = 2, kLeft = 3, kParts = 8;

Image shifted(const Image& image, int64_t most, const Rng& rng) {
  const auto steps = uint64_t(2 * most + 1);
  return shift(image, int64_t(rng.below(kTop, steps)) - most,
               int64_t(rng.below(kLeft, steps)) - most);
}

// As torchvision's RandomResizedCrop, but for at least 0.35 of the area.
Image random_part(const Image& image, const Rng& rng) {
  for (uint64_t i = 0; i < 20; i += 2) {
    const double area =
        double(image.height * image.width) * (0.35 + 0.65 * rng.uniform(kParts + i));
    const double aspect = std::pow(4.0 / 3, 2 * double(rng.uniform(kParts + i + 1)) - 1);
    const auto h = std::lround(std::sqrt(area / aspect)), w = std::lround(std::sqrt(area * aspect));
    if (h < 1 || w < 1 || h > image.height || w > image.width) continue;
    return crop(image, int64_t(rng.below(kTop, uint64_t(image.height - h + 1))),
                int64_t(rng.below(kLeft, uint64_t(image.width - w + 1))), h, w);
  }
  // Too long for any: the middle, as high or wide as may be.
  const int64_t height = std::clamp<int64_t>(image.width * 4 / 3, 1, image.height);
  const int64_t width = std::clamp<int64_t>(height * 4 / 3, 1, image.width);
  return crop(image, (image.height - height) / 2, (image.width - width) / 2, height, width);
}

// A file of unsigned bytes in an array: two zeros, 8 for their type, the number of dims, the dims.
class Idx {
 public:
  Idx(const fs::path& path, size_t dims) : file_(path), begin_(4 + 4 * dims) {
    const auto name = path.string();
    if (file_.size() >= 2 && byte(0) == 0x1f && byte(1) == 0x8b)
      fail(Kind::Io, "'", name, "' is compressed: gunzip it");
    if (file_.size() < begin_)
      fail(Kind::Io, "'", name, "' ends at byte ", file_.size(), ", within its header of ", begin_);
    if (number(0) != 0x800 + dims)
      fail(Kind::Io, std::hex, std::setfill('0'), "'", name, "' has ", std::setw(8), number(0),
           " at byte 0, and ", std::setw(8), 0x800 + dims, " is wanted: unsigned bytes in ", dims,
           dims == 1 ? " dim" : " dims");
    int64_t wanted = 1;
    for (size_t i = 0; i < dims; ++i) {
      dims_.push_back(int64_t(number(4 + 4 * i)));
      // The first may be any number of 32 bits: the product still fits.
      if (dims_[i] == 0 || (i > 0 && dims_[i] > kMaxPixels / (i == 1 ? 1 : dims_[1])))
        fail(Kind::Io, "'", name, "' says ", dims_[i], " at byte ", 4 + 4 * i, " for a size");
      wanted *= dims_[i];
    }
    if (int64_t(file_.size() - begin_) != wanted)
      fail(Kind::Io, "'", name, "' should have ", wanted, " bytes from byte ", begin_,
           " on, and has ", file_.size() - begin_);
  }
  int64_t dim(size_t i) const { return dims_[i]; }
  const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(file_.data()) + begin_; }

 private:
  uint64_t byte(size_t at) const { return uint8_t(file_.data()[at]); }
  uint64_t number(size_t at) const {
    return byte(at) << 24 | byte(at + 1) << 16 | byte(at + 2) << 8 | byte(at + 3);
  }
  const MappedFile file_;
  const size_t begin_;
  std::vector<int64_t> dims_;
};

class IdxImages final : public Images {
 public:
  IdxImages(const fs::path& images, const fs::path& labels, const ImagesOptions& options)
      : Images(options), images_(images, 3), labels_(labels, 1), name_(images.string()) {
    if (options_.channels == 0) options_.channels = 1;
    if (images_.dim(0) != labels_.dim(0))
      fail(Kind::Io, "'", images.string(), "' says ", images_.dim(0), " images at byte 4, and '",
           labels.string(), "' ", labels_.dim(0), " labels");
    const int64_t last = *std::max_element(labels_.data(), labels_.data() + size());
    for (int64_t i = 0; i <= last; ++i) class_names_.push_back(std::to_string(i));
    height_ = options.size > 0 ? options.size : images_.dim(1);
    width_ = options.size > 0 ? options.size : images_.dim(2);
  }
  int64_t size() const override { return images_.dim(0); }

 private:
  Image load(int64_t sample, const Rng* rng) const override {
    Image image{images_.dim(1), images_.dim(2)};
    const int64_t count = image.height * image.width;
    for (int64_t i = 0; i < count; ++i)
      image.pixels.insert(image.pixels.end(), 3, images_.data()[sample * count + i]);
    image = middle(image, name_);
    return rng != nullptr ? shifted(image, 2, *rng) : image;  // digits are never mirrored
  }
  int64_t label(int64_t sample) const override { return labels_.data()[sample]; }

  const Idx images_, labels_;
  const std::string name_;
};

bool is_picture(const fs::path& path) {
  auto kind = path.extension().string();
  std::ranges::transform(kind, kind.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return kind == ".png" || kind == ".jpg" || kind == ".jpeg";
}

class FolderImages final : public Images {
 public:
  FolderImages(const std::string& path, const ImagesOptions& options) : Images(options) {
    if (options_.channels == 0) options_.channels = 3;
    std::vector<fs::path> folders;
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.is_directory() && !entry.path().filename().string().starts_with("."))
        folders.push_back(entry.path());
    std::ranges::sort(folders);
    if (folders.empty())
      fail(Kind::Config, "data.path: '", path,
           "' has neither a sub-folder of pictures for each class nor MNIST's IDX files");
    for (const auto& folder : folders) {
      const auto name = folder.string();
      const size_t before = files_.size();
      for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (auto file = entry.path().string(); entry.is_regular_file() && is_picture(file) &&
                                               file.find("/.", name.size()) == file.npos)  // hidden
          files_.push_back({std::move(file), num_classes()});
      if (files_.size() == before)
        fail(Kind::Config, "data.path: '", name,
             "' would be a class, and has no .png, .jpg or .jpeg file");
      std::sort(files_.begin() + int64_t(before), files_.end(),
                [](const File& a, const File& b) { return a.path < b.path; });
      class_names_.push_back(folder.filename().string());
    }
    const Image first = read_image(files_[0].path);
    height_ = options.size > 0 ? options.size : first.height;
    width_ = options.size > 0 ? options.size : first.width;
  }
  int64_t size() const override { return int64_t(files_.size()); }

 private:
  struct File {
    std::string path;
    int64_t label;
  };
  Image load(int64_t sample, const Rng* rng) const override {
    const std::string& path = files_[size_t(sample)].path;
    Image image = read_image(path);
    if (options_.size == 0 && (image.height != height_ || image.width != width_))
      fail(Kind::Io, "'", path, "' is ", image.height, " x ", image.width, ", and '",
           files_[0].path, "' ", height_, " x ", width_, "; give a size to scale them to");
    if (rng == nullptr) return middle(image, path);
    image = options_.size > 0 ? resize(random_part(image, *rng), height_, width_)
                              : shifted(image, std::min(height_, width_) / 8, *rng);
    return options_.flip && rng->uniform(kFlip) < 0.5f ? flip(image) : image;
  }
  int64_t label(int64_t sample) const override { return files_[size_t(sample)].label; }

  std::vector<File> files_;
};

// The file of images in a folder of IDX files, if it is one.
fs::path idx_in(const std::string& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const auto at = name.find("images");
    if (entry.is_regular_file() && at != name.npos && name.find("idx3", at) != name.npos)
      found.push_back(entry.path());
  }
  std::ranges::sort(found);
  const auto keep = [&](auto wanted) {
    if (std::ranges::any_of(found, wanted))
      std::erase_if(found, [&](const fs::path& path) { return !wanted(path); });
  };
  keep([](const fs::path& path) { return path.extension() != ".gz"; });
  keep([](const fs::path& path) { return path.filename().string().starts_with("train"); });
  if (found.size() > 1)
    fail(Kind::Config, "data.path: '", folder, "' has '", found[0].filename().string(), "' and '",
         found[1].filename().string(), "'; name the one");
  return found.empty() ? fs::path() : found[0];
}

// train-labels-idx1-ubyte for train-images-idx3-ubyte.
fs::path labels_of(const fs::path& images) {
  auto name = images.filename().string();
  for (const auto& [from, to] : {std::pair("images", "labels"), {"idx3", "idx1"}})
    if (const auto at = name.find(from); at != name.npos)
      name.replace(at, std::string_view(from).size(), to);
    else
      fail(Kind::Config, "data.path: '", images.string(),
           "' is no folder, nor named like MNIST's train-images-idx3-ubyte");
  const auto labels = images.parent_path() / name;
  if (!fs::exists(labels))
    fail(Kind::Io, "there is no '", labels.string(), "' for the labels of '", images.string(), "'",
         fs::exists(labels.string() + ".gz") ? "; gunzip its .gz" : "");
  return labels;
}

}  // namespace

Images::Images(const ImagesOptions& options) : options_(options) {
  if (options.channels != 0 && options.channels != 1 && options.channels != 3)
    fail(Kind::Config, "pictures have 1 or 3 channels, not ", options.channels);
  if (options.size < 0 || options.size > 10000)
    fail(Kind::Config, "pictures can have a size of 1 to 10000, or 0 for their own, not ",
         options.size);
}

Image Images::middle(const Image& image, const std::string& name) const {
  if (options_.size == 0) return image;
  const int64_t side = options_.size, shorter = std::min(image.height, image.width);
  const int64_t height = side * image.height / shorter, width = side * image.width / shorter;
  if (height * width > kMaxPixels)
    fail(Kind::Io, "'", name, "' is too long to scale: ", image.height, " x ", image.width);
  return crop(resize(image, height, width), (height - side) / 2, (width - side) / 2, side, side);
}

Batch Images::read(const std::vector<int64_t>& samples,
                   const std::vector<int64_t>* positions) const {
  static const auto kScaled = [] {
    std::array<float, 256> scaled;
    for (int i = 0; i < 256; ++i) scaled[size_t(i)] = (float(i) / 255 - 0.5f) / 0.5f;
    return scaled;
  }();
  const auto count = int64_t(samples.size()), area = height_ * width_;
  const at::Tensor input = at::empty({count, channels(), height_, width_}, at::kFloat);
  const at::Tensor target = at::empty({count}, at::kLong);
  auto* to = input.mutable_data_ptr<float>();
  for (size_t i = 0; i < samples.size(); ++i, to += channels() * area) {
    YOKE_CHECK(samples[i] >= 0 && samples[i] < size(), samples[i], " of ", size());
    const Rng rng(options_.seed, "images", positions != nullptr ? uint64_t((*positions)[i]) : 0);
    const Image image = load(samples[i], positions != nullptr ? &rng : nullptr);
    const uint8_t* from = image.pixels.data();
    for (int64_t p = 0; p < area; ++p, from += 3)
      if (channels() == 3)
        for (int64_t c = 0; c < 3; ++c) to[c * area + p] = kScaled[from[c]];
      else
        to[p] = kScaled[(from[0] * 19595u + from[1] * 38470u + from[2] * 7471u + 0x8000) >> 16];
    target.mutable_data_ptr<int64_t>()[i] = label(samples[i]);
  }
  return {input, target};
}

Batch Images::batch(const std::vector<int64_t>& samples) const { return read(samples, nullptr); }

Batch Images::draw(const std::vector<int64_t>& samples,
                   const std::vector<int64_t>& positions) const {
  YOKE_CHECK(samples.size() == positions.size());
  return read(samples, options_.augment ? &positions : nullptr);
}

std::shared_ptr<Images> open_images(const std::string& path, const ImagesOptions& options) {
  if (!fs::exists(path))
    fail(Kind::Config, "data.path: there is no '", path, "'; give a folder of pictures");
  const fs::path idx = fs::is_directory(path) ? idx_in(path) : fs::path(path);
  std::shared_ptr<Images> images;
  if (idx.empty())
    images = std::make_shared<FolderImages>(path, options);
  else
    images = std::make_shared<IdxImages>(idx, labels_of(idx), options);
  if (images->size() < 2)
    fail(Kind::Config, "data.path '", path, "' has one picture; two are wanted at least");
  return images;
}

}  // namespace yoke::data
