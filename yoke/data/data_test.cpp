// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/data/dataset.h"
#include "yoke/data/sampler.h"

namespace yoke::data {

TEST(Sampler, EveryEpochHasEverySampleOnceInAnotherOrder) {
  for (const int64_t size : {1, 2, 3, 16, 17, 1000}) {
    const Sampler shuffled(size, true, 7), plain(size, false, 7);
    std::vector<std::vector<int64_t>> epochs(3);
    for (int64_t i = 0; i < 3 * size; ++i) {
      epochs[size_t(i / size)].push_back(shuffled.at(i));
      EXPECT_EQ(plain.at(i), i % size);
    }
    for (const auto& epoch : epochs)
      EXPECT_EQ(std::set<int64_t>(epoch.begin(), epoch.end()).size(), size_t(size));
    if (size < 16) continue;
    EXPECT_NE(epochs[0], epochs[1]);
    EXPECT_NE(Sampler(size, true, 8).at(0) * size + Sampler(size, true, 8).at(1),
              epochs[0][0] * size + epochs[0][1]);
  }
}

// A shuffle leaves next to nothing where it was, and neighbours part.
TEST(Sampler, ShufflesWell) {
  const int64_t size = 10000;
  const Sampler sampler(size, true, 1);
  int fixed = 0, neighbours = 0;
  for (int64_t i = 0; i + 1 < size; ++i) {
    fixed += sampler.at(i) == i;
    neighbours += std::abs(sampler.at(i) - sampler.at(i + 1)) == 1;
  }
  EXPECT_LT(fixed, 10);
  EXPECT_LT(neighbours, 15);
}

TEST(Text, IsTheBytesOfTheTextFilesInOrder) {
  const auto folder = std::filesystem::path(testing::TempDir()) / cat("yoke_text_", ::getpid());
  std::filesystem::create_directories(folder / "b");
  std::filesystem::create_directories(folder / ".git");
  std::ofstream(folder / "c.txt") << "cd\xc3";
  std::ofstream(folder / "b" / "a.txt") << "ab";
  std::ofstream(folder / ".git" / "x") << "hidden";
  std::ofstream(folder / "z.bin") << std::string("z\0z", 3);
  const auto text = open_text(folder.string(), 2);
  EXPECT_EQ(text->size(), 2);
  const auto batch = text->batch({1, 0});
  EXPECT_TRUE(at::equal(batch.input, at::tensor({99, 100, 97, 98}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(batch.target, at::tensor({100, 0xc3, 98, 99}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(part_of(text, 1, 2)->batch({0}).input, batch.input.narrow(0, 0, 1)));
  for (const auto& [path, seq] : {std::pair(folder.string(), 8), {(folder / "none").string(), 2}})
    try {
      open_text(path, seq);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Kind::Config);
    }
  std::filesystem::remove_all(folder);
}

TEST(Synthetic, IsTheSameForWhoeverAsks) {
  const auto words = synthetic_words(50, 8, 3);
  const auto both = words->batch({4, 9});
  EXPECT_TRUE(at::equal(words->batch({9}).input[0], both.input[1]));
  EXPECT_TRUE(at::equal(both.input.narrow(1, 1, 7), both.target.narrow(1, 0, 7)));
  EXPECT_LT(both.target.max().item<int64_t>(), 50);
  const auto vectors = synthetic_vectors(4, 3);
  EXPECT_TRUE(at::equal(vectors->batch({7, 5}).target[1], vectors->batch({5}).target[0]));
}

}  // namespace yoke::data
