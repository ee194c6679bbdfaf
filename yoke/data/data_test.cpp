// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
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
  const auto text = open_text(folder.string(), {.seq = 2});
  EXPECT_EQ(text->size(), 2);
  const auto batch = text->batch({1, 0});
  EXPECT_TRUE(at::equal(batch.input, at::tensor({99, 100, 97, 98}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(batch.target, at::tensor({100, 0xc3, 98, 99}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(part_of(text, 1, 2)->batch({0}).input, batch.input.narrow(0, 0, 1)));
  for (const auto& [path, seq] : {std::pair(folder.string(), 8), {(folder / "none").string(), 2}})
    try {
      open_text(path, {.seq = seq});
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Kind::Config);
    }
  std::filesystem::remove_all(folder);
}

TEST(Tokens, AreThoseOfTheFiles) {
  const auto folder = std::filesystem::path(testing::TempDir()) / cat("yoke_tokens_", ::getpid());
  std::filesystem::create_directories(folder);
  const auto write = [&](const std::string& name, const auto& values, const std::string& header) {
    std::ofstream file(folder / name, std::ios::binary);
    file << header;
    file.write(reinterpret_cast<const char*>(values.data()),
               std::streamsize(values.size() * sizeof values[0]));
  };
  const auto numpy = [](const std::string& type, const std::string& shape) {
    std::string text =
        cat("{'descr': '", type, "', 'fortran_order': False, 'shape': ", shape, ", }");
    text += std::string(117 - text.size(), ' ') + "\n";
    return std::string("\x93NUMPY\x01\0", 8) + char(text.size()) + '\0' + text;
  };
  write("a.bin", std::vector<uint16_t>{1, 2, 3, 4, 5, 6}, "");
  write("b.npy", std::vector<int32_t>{7, 8, 9, 10}, numpy("<i4", "(4,)"));
  write("note.txt", std::vector<char>{'x'}, "");
  const auto tokens = open_tokens(folder.string(), 2, 100);
  ASSERT_EQ(tokens->size(), 3);  // two of the first file, one of the second
  const auto batch = tokens->batch({2, 0});
  EXPECT_TRUE(at::equal(batch.input, at::tensor({7, 8, 1, 2}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(batch.target, at::tensor({8, 9, 2, 3}, at::kLong).view({2, 2})));
  const auto refuses = [](const std::string& what, const std::function<void()>& fn) {
    try {
      fn();
      ADD_FAILURE() << "no error with '" << what << "'";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  const auto open = [&](const std::string& name, int64_t vocab = 100) {
    return open_tokens((folder / name).string(), 2, vocab);
  };
  refuses("b.npy' has the token 9 at byte 136, and the model knows 9",
          [&] { open_tokens(folder.string(), 2, 9)->batch({2}); });
  write("odd.bin", std::vector<char>{1, 2, 3}, "");
  refuses("ends in the middle of a token: its 3 bytes", [&] { open("odd.bin"); });
  write("wide.bin", std::vector<uint32_t>{70000, 1, 2, 3, 4}, "");
  EXPECT_EQ(open("wide.bin", 80000)->batch({0}).input[0][0].item<int64_t>(), 70000);
  write("short.npy", std::vector<uint16_t>{1, 2, 3}, numpy("<u2", "(9,)"));
  refuses("should have 9 tokens and has 3", [&] { open("short.npy"); });
  write("two.npy", std::vector<uint16_t>{1, 2, 3, 4}, numpy("<u2", "(2, 2)"));
  refuses("it wants one dim", [&] { open("two.npy"); });
  write("real.npy", std::vector<float>{1, 2, 3, 4}, numpy("<f4", "(4,)"));
  refuses("it wants integers", [&] { open("real.npy"); });
  refuses("it does not begin like one", [&] {
    write("text.npy", std::vector<char>{'t', 'e', 'x', 't'}, "");
    open("text.npy");
  });
  refuses("there is no", [&] { open("none.bin"); });
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
