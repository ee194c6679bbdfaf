// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/images.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "yoke/base/error.h"
#include "yoke/data/image_file.h"

namespace yoke::data {
namespace {

namespace fs = std::filesystem;

std::string bytes(std::string_view hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2)
    out += char(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  return out;
}

// All of 2 x 3 pixels, made by Pillow: 16 bits with alpha, interlaced; a palette of 2 bits with an
// alpha; a JPEG of one colour; a grey one.
const std::string kDeepPng = bytes(
    "89504e470d0a1a0a0000000d4948445200000003000000021006000001bae38acf0000002f49444154789c6360f8ff"
    "ff3f1323030383bffccef5608606ff9deb604699feb4761063ae7d713c883ee21f600ea20163e20bda3d0b49d60000"
    "000049454e44ae426082");
const std::string kPalettePng = bytes(
    "89504e470d0a1a0a0000000d4948445200000003000000020203000000e01a8e890000000c504c5445ff000000ff00"
    "0000ff090807a2d262c00000000274524e5300809b2b4e180000000c49444154789c639060780200013000fd56cd1c"
    "730000000049454e44ae426082");
const std::string kColourJpeg = bytes(
    "ffd8ffe000104a46494600010100000100010000ffdb004300080606070605080707070909080a0c140d0c0b0b0c19"
    "12130f141d1a1f1e1d1a1c1c20242e2720222c231c1c2837292c30313434341f27393d38323c2e333432ffdb004301"
    "0909090c0b0c180d0d1832211c21323232323232323232323232323232323232323232323232323232323232323232"
    "32"
    "32323232323232323232323232323232ffc00011080002000303012200021101031101ffc400150001010000000000"
    "0000000000000000000006ffc40014100100000000000000000000000000000000ffc4001501010100000000000000"
    "000000000000000507ffc40014110100000000000000000000000000000000ffda000c03010002110311003f009600"
    "1a90ffd9");
const std::string kGreyJpeg = bytes(
    "ffd8ffe000104a46494600010100000100010000ffdb004300100b0c0e0c0a100e0d0e1211101318281a1816161831"
    "23251d283a333d3c3933383740485c4e404457453738506d51575f626768673e4d71797064785c656763ffc0000b08"
    "0002000301011100ffc40014000100000000000000000000000000000004ffc4001b10000301000301000000000000"
    "000000000102030400053161ffda0008010100003f007e0ebf15b3b3db1e7a30b5501792921568c1479e00001f073f"
    "ffd9");

class ImagesTest : public testing::Test {
 protected:
  ~ImagesTest() override { fs::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& text) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  std::vector<uint8_t> read(const std::string& text) {
    const Image image = read_image(write("one", text));
    EXPECT_EQ(image.height, 2);
    EXPECT_EQ(image.width, 3);
    return image.pixels;
  }
  static void refuses(Kind kind, const std::string& what, const std::function<void()>& fn) {
    try {
      fn();
      ADD_FAILURE() << "no error with '" << what << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  }
  bool can_read() {
    try {
      read_image(write("probe", kPalettePng));
    } catch (const Error& error) {
      return error.kind() != Kind::Usage;
    }
    return true;
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / cat("yoke_images_", ::getpid());
};

std::string big_endian(std::initializer_list<uint32_t> numbers) {
  std::string out;
  for (const uint32_t number : numbers)
    for (int shift = 24; shift >= 0; shift -= 8) out += char(number >> shift);
  return out;
}

using Idx = ImagesTest;
using Files = ImagesTest;

Image made() {
  Image image{5, 7};
  for (int i = 0; i < 5 * 7 * 3; ++i) image.pixels.push_back(uint8_t(i * i * 31 + i * 7));
  return image;
}

void expect_near(const std::vector<uint8_t>& got, const std::vector<int>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1) << i;
}

TEST(Image, IsResizedAsByPillow) {
  expect_near(
      resize(made(), 3, 4).pixels,
      {90,  48,  128, 82,  81,  193, 169, 167, 125, 164, 141, 188, 143, 87,  164, 95,  101, 115,
       160, 191, 88,  183, 167, 86,  153, 93,  178, 140, 82,  115, 152, 103, 83,  171, 153, 89});
  expect_near(resize(crop(made(), 1, 1, 2, 2), 3, 3).pixels,
              {104, 94, 146, 54, 137, 154, 4,   180, 162, 109, 110, 173, 76, 106,
               134, 42, 101, 94, 114, 126, 200, 97,  74,  113, 80,  22,  26});
  EXPECT_EQ(resize(made(), 5, 7).pixels, made().pixels);
}

TEST(Image, IsCroppedFlippedAndShifted) {
  const Image image{2, 2, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}};
  EXPECT_EQ(crop(image, 1, 0, 1, 2).pixels, (std::vector<uint8_t>{7, 8, 9, 10, 11, 12}));
  EXPECT_EQ(flip(image).pixels, (std::vector<uint8_t>{4, 5, 6, 1, 2, 3, 10, 11, 12, 7, 8, 9}));
  EXPECT_EQ(shift(image, 1, -1).pixels, (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 4, 5, 6, 0, 0, 0}));
  EXPECT_EQ(shift(image, -1, 0).pixels,
            (std::vector<uint8_t>{7, 8, 9, 10, 11, 12, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(shift(image, 0, 9).pixels, std::vector<uint8_t>(12));
}

TEST_F(Files, OfEitherKindAreReadAsPillowDoes) {
  if (!can_read()) GTEST_SKIP() << "built without libpng and libjpeg";
  EXPECT_EQ(read(kDeepPng), (std::vector<uint8_t>{0, 255, 2, 40, 220, 2, 79, 185, 2, 118, 150, 2,
                                                  157, 115, 2, 196, 80, 2}));
  EXPECT_EQ(read(kPalettePng),
            (std::vector<uint8_t>{255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7, 0, 0, 255, 0, 255, 0}));
  expect_near(read(kColourJpeg),
              {201, 40, 32, 201, 40, 32, 201, 40, 32, 201, 40, 32, 201, 40, 32, 201, 40, 32});
  expect_near(read(kGreyJpeg),
              {2, 2, 2, 187, 187, 187, 28, 28, 28, 188, 188, 188, 81, 81, 81, 207, 207, 207});
}

TEST_F(Files, ThatAreCutOffOrStrangeAreErrors) {
  if (!can_read()) GTEST_SKIP() << "built without libpng and libjpeg";
  for (const auto& whole : {kDeepPng, kPalettePng, kColourJpeg, kGreyJpeg})
    for (size_t cut = 1; cut <= whole.size(); cut += 9)
      refuses(Kind::Io,
              "one' is no picture to read: ", [&] { read(whole.substr(0, whole.size() - cut)); });
  refuses(Kind::Io, "neither like a PNG nor like a JPEG", [&] { read("GIF89a"); });
  auto bent = kDeepPng;
  bent[19] ^= 1;
  refuses(Kind::Io, "CRC", [&] { read(bent); });
  auto huge = kGreyJpeg;
  huge.replace(huge.find("\xff\xc0") + 5, 4, "\x80\x01\x80\x01", 4);
  refuses(Kind::Io, "32769 x 32769, and 100000000 pixels are the most", [&] { read(huge); });
}

TEST_F(Files, InSubFoldersAreSamplesOfClasses) {
  if (!can_read()) GTEST_SKIP() << "built without libpng and libjpeg";
  fs::remove_all(folder_);
  write("cat/b.JPG", kGreyJpeg);
  write("cat/a/x.png", kPalettePng);
  write("cat/.a/x.png", "hidden");
  write("cat/note.txt", "no picture");
  write("ant/a.Jpeg", kColourJpeg);
  const auto images = open_images(folder_.string(), {.size = 0});
  EXPECT_EQ(images->class_names(), (std::vector<std::string>{"ant", "cat"}));
  EXPECT_EQ(images->size(), 3);
  const auto batch = images->batch({2, 1, 0});
  EXPECT_EQ(batch.input.sizes(), (std::vector<int64_t>{3, 3, 2, 3}));
  EXPECT_TRUE(at::equal(batch.target, at::tensor({1, 1, 0}, at::kLong)));
  // Red, green, blue of the palette's first row.
  EXPECT_TRUE(at::equal(batch.input[1].select(1, 0), at::eye(3) * 2 - 1));
  const auto grey = open_images(folder_.string(), {.size = 2, .channels = 1})->batch({1, 2});
  EXPECT_EQ(grey.input.sizes(), (std::vector<int64_t>{2, 1, 2, 2}));
  EXPECT_NEAR(grey.input[0][0][0][0].item<float>(), 76 / 127.5 - 1, 1e-6);  // red, as Pillow's L

  auto thin = kGreyJpeg;
  thin.replace(thin.find("\xff\xc0") + 5, 4, "\0\1\0\3", 4);
  write("cat/c.jpg", thin);
  refuses(Kind::Io, "c.jpg' is 1 x 3, and '",
          [&] { open_images(folder_.string(), {})->batch({3}); });
  EXPECT_EQ(open_images(folder_.string(), {.size = 2})->batch({3}).input.size(3), 2);
  fs::remove(folder_ / "cat/c.jpg");
  write("cat/c.png", "damaged");
  refuses(Kind::Io, "c.png' is no picture to read",
          [&] { open_images(folder_.string(), {})->batch({3}); });
  fs::create_directories(folder_ / "dog");
  refuses(Kind::Config, "dog' would be a class", [&] { open_images(folder_.string(), {}); });
  refuses(Kind::Config, "a sub-folder of pictures for each class",
          [&] { open_images((folder_ / "ant").string(), {}); });
  refuses(Kind::Config, "1 or 3 channels", [&] { open_images(folder_.string(), {.channels = 2}); });
}

TEST_F(Files, AreDrawnByPositionAlone) {
  if (!can_read()) GTEST_SKIP() << "built without libpng and libjpeg";
  fs::remove_all(folder_);
  write("a/1.jpg", kGreyJpeg);
  write("b/1.png", kDeepPng);
  const auto images = open_images(folder_.string(), {.size = 8, .augment = true});
  const auto plain = images->batch({0, 1});
  const auto drawn = images->draw({0, 1}, {5, 6});
  EXPECT_TRUE(at::equal(images->draw({1}, {6}).input[0], drawn.input[1]));
  EXPECT_TRUE(at::equal(drawn.target, plain.target));
  EXPECT_FALSE(at::equal(drawn.input, plain.input));
  EXPECT_FALSE(at::equal(images->draw({0}, {7}).input, images->draw({0}, {5}).input));
  EXPECT_TRUE(at::equal(images->batch({0, 1}).input, plain.input));
  const auto other = open_images(folder_.string(), {.size = 8, .augment = true, .seed = 2});
  EXPECT_FALSE(at::equal(other->draw({0, 1}, {5, 6}).input, drawn.input));
  const auto still = open_images(folder_.string(), {.size = 8});
  EXPECT_TRUE(at::equal(still->draw({0, 1}, {5, 6}).input, plain.input));
}

TEST_F(Idx, IsReadAsMnistHasIt) {
  std::string pixels;
  for (int i = 0; i < 2 * 6 * 5; ++i) pixels += char(i);
  write("train-images-idx3-ubyte", big_endian({0x803, 2, 6, 5}) + pixels);
  write("train-labels-idx1-ubyte", big_endian({0x801, 2}) + "\3\1");
  write("t10k-images-idx3-ubyte", "");
  const auto images = open_images(folder_.string(), {.channels = 1, .augment = true});
  EXPECT_EQ(images->size(), 2);
  EXPECT_EQ(images->num_classes(), 4);
  EXPECT_EQ(images->height(), 6);
  EXPECT_EQ(images->width(), 5);
  const auto batch = images->batch({1});
  EXPECT_EQ(batch.target.item<int64_t>(), 1);
  const auto wanted = (at::arange(30, 60, at::kFloat) / 255 - 0.5) / 0.5;
  EXPECT_TRUE(at::allclose(batch.input.flatten(), wanted, 0, 1e-6));
  // Whatever is left of a shifted picture, the middle stays in view.
  for (int64_t position = 0; position < 50; ++position) {
    const auto input = images->draw({1}, {position}).input[0][0];
    EXPECT_EQ((input == batch.input[0][0][2][2]).sum().item<int64_t>(), 1);
    EXPECT_GE((input > -1).sum().item<int64_t>(), 4 * 3);
  }
  const auto file = (folder_ / "train-images-idx3-ubyte").string();
  EXPECT_EQ(open_images(file, {.size = 4})->batch({0, 1}).input.sizes(),
            (std::vector<int64_t>{2, 1, 4, 4}));
  EXPECT_EQ(open_images(file, {.size = 4, .channels = 3})->batch({0, 1}).input.sizes(),
            (std::vector<int64_t>{2, 3, 4, 4}));
}

TEST_F(Idx, ThatIsDamagedIsAnError) {
  const auto with = [&](const std::string& images, const std::string& labels) {
    write("labels-idx1", labels);
    return [this, path = write("images-idx3", images)] { open_images(folder_.string(), {}); };
  };
  const auto images = big_endian({0x803, 2, 1, 1}) + "ab", labels = big_endian({0x801, 2}) + "ab";
  EXPECT_NO_THROW(with(images, labels)());
  const auto io = Kind::Io;
  refuses(io, "idx3' ends at byte 0, within its header of 16", with("", labels));
  refuses(io, "idx3' has 00000801 at byte 0, and 00000803 is wanted",
          with(labels + labels, labels));
  refuses(io, "idx3' should have 2 bytes from byte 16 on, and has 3", with(images + "c", labels));
  refuses(io, "idx1' should have 2 bytes from byte 8 on, and has 1",
          with(images, labels.substr(0, 9)));
  refuses(io, "says 2 images at byte 4", with(images, big_endian({0x801, 1}) + "a"));
  refuses(io, "says 0 at byte 12", with(big_endian({0x803, 2, 1, 0}), labels));
  refuses(io, "says 4294967295 at byte 8", with(big_endian({0x803, ~0u, ~0u, ~0u}), labels));
  refuses(io, "idx3' is compressed: gunzip it", with("\x1f\x8b", labels));
  fs::remove(folder_ / "labels-idx1");
  refuses(io, "there is no", [&] { open_images(folder_.string(), {}); });
  write("images-idx3", images);
  write("more-images-idx3", images);
  refuses(Kind::Config, "name the one", [&] { open_images(folder_.string(), {}); });
  refuses(Kind::Config, "there is no", [&] { open_images((folder_ / "none").string(), {}); });
  refuses(Kind::Config, "is no folder, nor named like MNIST's",
          [&] { open_images(write("x.png", "x"), {}); });
}

}  // namespace
}  // namespace yoke::data
