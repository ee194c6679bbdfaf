// SPDX-License-Identifier: Apache-2.0
// The contract of communicator.h: what happens when ranks disagree, fail, leave or never come.
#include <thread>
#include <tuple>

#include "yoke/comm/contract_test.h"

namespace yoke::comm {

// Every rank hears of it, and the text names both calls and the number of the operation.
TEST_P(CommContract, RanksThatDisagreeAllGetOneErrorThatNamesBothSides) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const std::vector<
      std::tuple<std::string, std::function<void(Communicator&, bool)>, std::string, std::string>>
      disagreements{
          {"the shapes differ",
           [&](Communicator& c, bool odd) { c.all_reduce(full({odd ? 3 : 4}, 0)).wait(); }, "[3]",
           "[4]"},
          {"the dtypes differ",
           [&](Communicator& c, bool odd) {
             c.all_reduce(full({2}, 0, odd ? at::kInt : at::kFloat)).wait();
           },
           "int", "float"},
          {"the reductions differ",
           [&](Communicator& c, bool odd) {
             c.all_reduce(full({2}, 0), odd ? ReduceOp::Max : ReduceOp::Min).wait();
           },
           "max", "min"},
          {"the roots differ",
           [&](Communicator& c, bool odd) { c.broadcast(full({2}, 0), odd ? 1 : 0).wait(); },
           "root 1", "root 0"},
          {"the operations differ",
           [&](Communicator& c, bool odd) {
             odd ? c.barrier() : c.all_reduce(full({2}, 0)).wait();
           },
           "barrier", "all_reduce"},
          {"the sizes differ",
           [&](Communicator& c, bool odd) {
             c.all_gather(full({c.size() * (odd ? 3 : 4)}, 0), full({odd ? 3 : 4}, 0)).wait();
           },
           "[3]", "[4]"},
      };
  for (const auto& [reason, call, one, other] : disagreements) {
    std::atomic<int> heard{0};
    const std::string text = failure_of(
        [&](Communicator& comm) {
          try {
            comm.barrier();  // the error may come before it ends
            call(comm, comm.rank() == size() - 1);
            comm.barrier();  // CUDA: wait() need not have noticed yet
          } catch (const Error& error) {
            const std::string what = error.what();
            EXPECT_NE(what.find(reason), std::string::npos) << what;
            EXPECT_NE(what.find("#1"), std::string::npos) << what;
            EXPECT_NE(what.find(one), std::string::npos) << what;
            EXPECT_NE(what.find(other), std::string::npos) << what;
            ++heard;
            throw;
          }
        },
        {.timeout = 60s, .check = true});
    EXPECT_EQ(heard, here()) << text;
  }
}

TEST_P(CommContract, AMessageOfTheWrongSizeIsNeverDelivered) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const at::Tensor inbox = full({3}, -1);
  const std::string text = failure_of(
      [&](Communicator& comm) {
        if (comm.rank() == 0) comm.send(full({4}, 7), 1).synchronize();
        if (comm.rank() == 1) comm.recv(inbox, 0).synchronize();
        comm.barrier();
      },
      {.timeout = 60s, .check = true});
  EXPECT_NE(text.find("float32 [4], to rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("[3], from rank 0"), std::string::npos) << text;
  expect_equal(inbox, full({3}, -1));
}

TEST_P(CommContract, ARankThatNeverArrivesIsNamedAtTheDeadline) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto start = std::chrono::steady_clock::now();
  const std::string text = failure_of(
      [&](Communicator& comm) {
        comm.barrier();
        if (comm.rank() == 1) return wait_for_failure();
        try {
          const at::Tensor tensor = full({8}, 1);
          comm.all_reduce(tensor).synchronize();
        } catch (const Error& error) {
          const std::regex last("rank 1[^:]*: finished barrier #0 on world");
          EXPECT_TRUE(std::regex_search(error.what(), last)) << error.what();
          throw;
        }
      },
      {.timeout = short_timeout()});
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  EXPECT_NE(text.find("all_reduce #1 on world; arrived: 0"), std::string::npos) << text;
  EXPECT_NE(text.find("not arrived: rank 1"), std::string::npos) << text;
}

TEST_P(CommContract, AnAbsentSenderIsNamedAtTheDeadline) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const std::string text = failure_of(
      [&](Communicator& comm) {
        if (comm.rank() != 0) return wait_for_failure();
        comm.recv(full({1}, 0), 1).synchronize();
      },
      {.timeout = short_timeout()});
  EXPECT_NE(text.find("recv #0 from rank 1 on world"), std::string::npos) << text;
}

TEST_P(CommContract, ARankThatReturnedIsNotAwaited) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  auto all_but_one = [&](Communicator& comm) {
    if (comm.rank() != 1) comm.all_reduce(full({1}, 1)).synchronize();
  };
  const bool alone = GetParam().launch && GetParam().launch->rank == 1 && here() == 1;
  if (alone) return run(all_but_one);  // a process whose ranks have returned hears no more
  const std::string text = failure_of(all_but_one);
  EXPECT_NE(text.find("rank 1, which has returned without joining"), std::string::npos) << text;
}

// Ranks leave right after their last operation, while others still wait in it.
TEST_P(CommContract, ARankThatReturnsAfterJoiningIsNotMissed) {
  // The moment in question is short; connecting NCCL is not.
  const int repeats = GetParam().nccl()             ? 5
                      : GetParam().launch           ? 20
                      : GetParam().device.is_cuda() ? 50
                                                    : 3000;
  for (int repeat = 0; repeat < repeats; ++repeat)
    run([&](Communicator& comm) { comm.all_reduce(full({3}, 1)).synchronize(); });
}

TEST_P(CommContract, ARankThatThrowsWakesItsPeersWithItsWords) {
  std::atomic<int> woken{0}, thrown{0};
  const std::string text = failure_of([&](Communicator& comm) {
    const Communicator row = comm.split(0, comm.rank());
    if (comm.rank() == size() - 1) {
      row.barrier();  // everybody has it
      ++thrown;
      throw std::runtime_error("out of cheese");
    }
    try {
      row.barrier();  // the words may come before it ends
      row.all_reduce(full({4}, 1)).synchronize();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Kind::Comm);
      EXPECT_NE(std::string(error.what()).find("out of cheese"), std::string::npos);
      EXPECT_THROW(comm.barrier(), Error);  // and so does everything after
      ++woken;
      throw;
    }
  });
  EXPECT_EQ(woken + thrown, here());
  EXPECT_NE(text.find("rank " + std::to_string(size() - 1) + " failed: out of cheese"),
            std::string::npos)
      << text;
}

TEST_P(CommContract, AbortFromAnotherThreadEndsTheWait) {
  if (size() == 1) GTEST_SKIP() << "needs a wait that does not end by itself";
  const std::string text = failure_of([&](Communicator& comm) {
    if (comm.rank() == 0) {
      std::jthread outsider([comm] { comm.abort("the user pressed the button"); });
      comm.recv(full({1}, 0), 1).synchronize();
    } else {
      comm.recv(full({1}, 0), 0).synchronize();
    }
  });
  EXPECT_NE(text.find("the user pressed the button"), std::string::npos) << text;
}

}  // namespace yoke::comm
