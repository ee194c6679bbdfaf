// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/saved.h"
#include "yoke/checkpoint/saver.h"
#include "yoke/comm/run_ranks.h"

namespace yoke::checkpoint {
namespace {

using comm::Communicator;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class Checkpoints : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = Path(testing::TempDir()) /
              cat("yoke_checkpoint_", ::getpid(), "_",
                  testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string failure_of(const std::function<void()>& fn) {
    try {
      fn();
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  }

  Path folder_;
};

at::Tensor numbers(const std::vector<int64_t>& shape, double first = 0) {
  return at::arange(plan::whole_box(shape).count(), at::kFloat).add_(first).reshape(shape);
}

// A rank's part of a matrix: rows or columns.
Piece part(const std::string& name, const at::Tensor& whole, int64_t dim, int rank, int ranks) {
  const int64_t size = whole.size(dim), begin = size * rank / ranks,
                end = size * (rank + 1) / ranks;
  auto box = plan::whole_box(whole.sizes().vec());
  box.offset[size_t(dim)] = begin;
  box.shape[size_t(dim)] = end - begin;
  return {name, whole.sizes().vec(), box, whole.narrow(dim, begin, end - begin)};
}

}  // namespace

TEST_F(Checkpoints, AFileReadsBackAndIsCheckedFirst) {
  const Path path = folder_ / "a.safetensors";
  const at::Tensor half = at::tensor({0.5, -1.0}).to(at::kBFloat16);
  write_safetensors(path,
                    {{"a", numbers({2, 3})},
                     {"half", half},
                     {"none", at::empty({0, 4})},
                     {"one", at::scalar_tensor(7, at::kLong)},
                     {"yes", at::tensor({1, 0, 1}).to(at::kBool)}},
                    {{"format", "pt"}});
  {
    const SafetensorsFile file(path);
    EXPECT_TRUE(at::equal(file.tensor("a"), numbers({2, 3})));
    EXPECT_TRUE(at::equal(file.tensor("half"), half));
    EXPECT_TRUE(at::equal(file.tensor("yes"), at::tensor({1, 0, 1}).to(at::kBool)));
    EXPECT_EQ(file.tensor("one").item<int64_t>(), 7);
    EXPECT_EQ(file.tensor("none").sizes(), (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(file.metadata().at("format"), "pt");
    EXPECT_TRUE(has(failure_of([&] { file.tensor("b"); }), "has no tensor 'b'"));
  }
  const std::string good = read_text(path);
  auto spoilt = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    return failure_of([&] { SafetensorsFile file(path); });
  };
  EXPECT_TRUE(has(spoilt(good.substr(0, good.size() - 1)), "is no safetensors file"));
  EXPECT_TRUE(has(spoilt(good + "x"), "1 bytes at its end belong to nobody"));
  EXPECT_TRUE(has(spoilt("1234"), "it has 4 bytes"));
  EXPECT_TRUE(has(spoilt(std::string(8, '\xff') + good.substr(8)), "its header would have"));
  for (size_t i = 8; i < 300; ++i) {  // any byte of the header: an error or another name, no crash
    std::string bytes = good;
    bytes[i] = char(bytes[i] ^ 4);
    spoilt(bytes);
  }
}

TEST_F(Checkpoints, WhatSomeRanksSaveOthersRead) {
  const at::Tensor rows = numbers({12, 5}), columns = numbers({3, 12}, 100);
  for (const int savers : {1, 2, 3}) {
    comm::run_ranks(savers, [&](Communicator& comm) {
      Saver saver(folder_, comm);
      Contents contents{{part("rows", rows, 0, comm.rank(), comm.size()),
                         part("columns", columns, 1, comm.rank(), comm.size())},
                        {{"config", cat("by ", savers)}}};
      if (comm.rank() == 0) contents.pieces.push_back({"one", {}, {}, at::scalar_tensor(2.5)});
      saver.save(savers, contents);
      EXPECT_EQ(saver.wait(), std::nullopt);
    });
    const auto path = latest(folder_);
    ASSERT_TRUE(path);
    EXPECT_EQ(path->filename(), step_name(savers));
    const Saved saved(*path);
    EXPECT_EQ(saved.step(), savers);
    EXPECT_EQ(saved.value("config"), cat("by ", savers));
    EXPECT_TRUE(has(failure_of([&] { saved.value("steps"); }), "has no 'steps', but config"));
    EXPECT_TRUE(at::equal(saved.whole("rows"), rows));
    EXPECT_EQ(saved.whole("one").item<float>(), 2.5);
    EXPECT_TRUE(saved.verify().empty());
    for (const int readers : {1, 2, 5})
      for (int rank = 0; rank < readers; ++rank)
        for (const int64_t dim : {0, 1}) {
          Piece wanted = part("columns", columns, dim, rank, readers);
          const at::Tensor truth = wanted.value.to(at::kDouble);
          wanted.value = at::zeros(wanted.box.shape, at::kDouble);
          saved.read({wanted});
          EXPECT_TRUE(at::equal(wanted.value, truth)) << savers << " " << readers << " " << dim;
        }
    EXPECT_TRUE(has(failure_of([&] { saved.whole("row"); }), "the nearest is 'rows'"));
    EXPECT_TRUE(has(failure_of([&] {
                      saved.read({{"rows", {5, 12}, plan::whole_box({5, 12}), numbers({5, 12})}});
                    }),
                    "is [0:12, 0:5], and the model's is [0:5, 0:12]"));
  }
}

TEST_F(Checkpoints, TheNewestAreKeptAndTheSameStepIsReplaced) {
  comm::run_ranks(2, [&](Communicator& comm) {
    Saver saver(folder_, comm, {.keep = 2});
    for (const int64_t step : {1, 2, 10, 10, 3}) {
      saver.save(step, {{part("x", numbers({4}, double(step)), 0, comm.rank(), 2)}, {}});
      EXPECT_EQ(saver.wait(), std::nullopt);
    }
  });
  std::vector<std::string> names;
  for (const auto& path : list(folder_)) names.push_back(path.filename());
  EXPECT_EQ(names, (std::vector<std::string>{"step-00000003", "step-00000010"}));
  EXPECT_EQ(Saved(*latest(folder_)).whole("x")[0].item<float>(), 10);
  size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++entries;
  EXPECT_EQ(entries, 3u);  // and the lock, and nothing else is left
  // What a crash has left behind is no checkpoint, and goes with the next run.
  std::filesystem::create_directories(folder_ / ".step-00000011.4");
  comm::run_ranks(1, [&](Communicator& comm) { Saver(folder_, comm); });
  EXPECT_FALSE(std::filesystem::exists(folder_ / ".step-00000011.4"));
}

TEST_F(Checkpoints, AreSavedToAFolderByOneAtATime) {
  comm::run_ranks(1, [&](Communicator& comm) {
    const Saver saver(folder_, comm);
    EXPECT_TRUE(has(failure_of([&] { Saver(folder_, comm); }), "another process is saving to"));
  });
  comm::run_ranks(1, [&](Communicator& comm) { Saver(folder_, comm); });
}

// The copy is made at once: what comes later does not matter.
TEST_F(Checkpoints, AreOfTheMomentTheyWereSaved) {
  comm::run_ranks(2, [&](Communicator& comm) {
    Saver saver(folder_, comm);
    const at::Tensor x = numbers({1 << 18});
    saver.save(1, {{part("x", x, 0, comm.rank(), 2)}, {}});
    x.fill_(-1);
    EXPECT_EQ(saver.wait(), std::nullopt);
  });
  EXPECT_TRUE(at::equal(Saved(*latest(folder_)).whole("x"), numbers({1 << 18})));
}

TEST_F(Checkpoints, WhatIsSavedTwiceOrNotAtAllIsNoCheckpoint) {
  for (const bool twice : {true, false})
    comm::run_ranks(2, [&](Communicator& comm) {
      Saver saver(folder_, comm);
      saver.save(1, {{part("x", numbers({4}), 0, twice ? 0 : comm.rank(), twice ? 1 : 3)}, {}});
      const auto failure = saver.wait();
      ASSERT_TRUE(failure);
      if (comm.rank() == 0) {
        EXPECT_TRUE(has(*failure, twice ? "[0:4] is there twice" : "2 of 4 elements are missing"))
            << *failure;
      }
    });
  EXPECT_TRUE(list(folder_).empty());
}

// A file that cannot be written, on rank 0 or on another, costs this checkpoint and no other.
TEST_F(Checkpoints, AFullDiskLeavesTheLastOne) {
  std::signal(SIGXFSZ, SIG_IGN);
  for (const int big : {0, 1})
    comm::run_ranks(2, [&](Communicator& comm) {
      Saver saver(folder_, comm);
      saver.save(1, {{part("x", numbers({4}), 0, comm.rank(), 2)}, {}});
      EXPECT_EQ(saver.wait(), std::nullopt);
      rlimit before{};
      ::getrlimit(RLIMIT_FSIZE, &before);
      const rlimit small{.rlim_cur = 1 << 16, .rlim_max = before.rlim_max};
      ::setrlimit(RLIMIT_FSIZE, &small);
      comm.barrier();
      const at::Tensor x = numbers({1 << 18});
      Contents contents{{part("x", x, 0, 0, 1)}, {}};
      if (comm.rank() != big) contents.pieces.clear();
      saver.save(2, contents);
      const auto failure = saver.wait();
      comm.barrier();
      ::setrlimit(RLIMIT_FSIZE, &before);
      ASSERT_TRUE(failure);
      if (comm.rank() > 0) return;
      EXPECT_TRUE(has(*failure, "the checkpoint of step 2 was not saved")) << *failure;
      EXPECT_TRUE(has(*failure, "File too large")) << *failure;
      EXPECT_EQ(list(folder_).size(), 1u);
      EXPECT_TRUE(Saved(*latest(folder_)).verify().empty());
    });
}

TEST_F(Checkpoints, DamageIsFoundAndNamed) {
  comm::run_ranks(1, [&](Communicator& comm) {
    Saver saver(folder_, comm, {.async = false});
    saver.save(1, {{part("x", numbers({4}), 0, 0, 1)}, {}});
  });
  const Path file = *latest(folder_) / "rank-00000.safetensors";
  std::string bytes = read_text(file);
  bytes.back() = char(bytes.back() ^ 1);
  std::ofstream(file, std::ios::binary) << bytes;
  const auto wrong = Saved(*latest(folder_)).verify();
  ASSERT_EQ(wrong.size(), 1u);
  EXPECT_TRUE(has(wrong[0], "'x' in rank-00000.safetensors has other bytes"));
  std::filesystem::remove(file);
  EXPECT_TRUE(has(Saved(*latest(folder_)).verify().at(0), "No such file"));
  std::ofstream(*latest(folder_) / kIndexName) << "{";
  EXPECT_TRUE(has(failure_of([&] { const Saved saved(*latest(folder_)); }), "cannot be read"));
  EXPECT_TRUE(has(failure_of([&] { const Saved saved(folder_); }),
                  "is no checkpoint: it has no index.json"));
}

}  // namespace yoke::checkpoint
