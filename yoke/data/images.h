// SPDX-License-Identifier: Apache-2.0
// Pictures and what is on them. A sample is a float32 [channels, height, width] from -1 to 1, its
// target the number of a class. Threads: all; files are read when a sample is.
#pragma once

#include "yoke/data/dataset.h"
#include "yoke/data/image.h"

namespace yoke {
class Rng;
}

namespace yoke::data {

struct ImagesOptions {
  int64_t size = 0;      // side of the square a sample is; 0: as the files are, all alike
  int64_t channels = 0;  // 1: grey, by Pillow's formula; 0: of IDX files 1, of others 3
  bool augment = false;  // draw() changes a picture by chance: another part of it, or mirrored
  bool flip = true;      // whether it may mirror
  uint64_t seed = 1;     // of these chances
};

class Images : public Dataset {
 public:
  int64_t num_classes() const { return int64_t(class_names_.size()); }
  const std::vector<std::string>& class_names() const { return class_names_; }
  int64_t channels() const { return options_.channels; }
  int64_t height() const { return height_; }
  int64_t width() const { return width_; }

  // The middle of each, the shorter side scaled to `size`.
  Batch batch(const std::vector<int64_t>& samples) const final;
  // The changes follow from the seed and the position alone.
  Batch draw(const std::vector<int64_t>& samples,
             const std::vector<int64_t>& positions) const final;

 protected:
  explicit Images(const ImagesOptions& options);
  Image middle(const Image& image, const std::string& name) const;

  ImagesOptions options_;
  std::vector<std::string> class_names_ = {};
  int64_t height_ = 0, width_ = 0;

 private:
  // A sample as a picture of height_ x width_, changed by `rng` if there is one.
  virtual Image load(int64_t sample, const Rng* rng) const = 0;
  virtual int64_t label(int64_t sample) const = 0;
  Batch read(const std::vector<int64_t>& samples, const std::vector<int64_t>* positions) const;
};

// A folder whose sub-folders are the classes, in the order of their names, with .png, .jpg and
// .jpeg files below; or a folder of MNIST's IDX files (those named train* where there are more), or
// its file of images. Throws Kind::Config where the path is neither, Kind::Io with file and offset
// where an IDX file is damaged; a picture that is, when it is read.
std::shared_ptr<Images> open_images(const std::string& path, const ImagesOptions& options);

}  // namespace yoke::data
