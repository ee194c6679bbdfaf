// SPDX-License-Identifier: Apache-2.0
// What is particular to the mpi backend. Every process that the launcher starts runs all tests, as
// one rank of a world of all of them; `mpirun -np 3 yoke_comm_mpi_tests`.
#include "yoke/comm/mpi/backend.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <thread>

#include "yoke/base/rng.h"
#include "yoke/comm/contract_test.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;
using Body = std::function<void(Communicator&)>;

int mpi_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

int mpi_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

std::shared_ptr<World> make_world(WorldOptions options = {.timeout = 30s}) {
  std::vector<Place> places;
  for (int rank = 0; rank < mpi_size(); ++rank) places.push_back({"here", rank});
  return std::make_shared<World>(Membership{places, mpi_rank(), 1, make_memory_store()},
                                 std::move(options));
}

using OnWorld = std::function<void(std::shared_ptr<World>)>;
void run(const Body& body, WorldOptions options = {.timeout = 30s}, OnWorld on_world = nullptr) {
  RunOptions run_options;
  run_options.on_world = std::move(on_world);
  run_options.backend = mpi_backend();
  detail::run_here(make_world(std::move(options)), body, run_options);
}

std::string failure_of(const Body& body, WorldOptions options, OnWorld on_world = nullptr) {
  std::string text = "nothing has failed";
  try {
    run(body, std::move(options), std::move(on_world));
  } catch (const Error& error) {
    text = error.what();
  }
  MPI_Barrier(MPI_COMM_WORLD);  // the next test is for all to begin at once
  return text;
}

void expect_text(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << "wanted '" << words << "' in: " << text;
}

// What the body leaves behind on this process's rank, when run over mpi and over local.
using Results = std::vector<at::Tensor>;
void expect_as_local(const std::function<Results(Communicator&)>& body) {
  Results got, want;
  run([&](Communicator& comm) { got = body(comm); });
  run_ranks(mpi_size(), [&](Communicator& comm) {
    const Results results = body(comm);
    if (comm.rank() == mpi_rank()) want = results;
  });
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(
        at::equal(got[i].contiguous().view(at::kByte), want[i].contiguous().view(at::kByte)))
        << "result " << i << " of rank " << mpi_rank();
}

// Different for each rank and purpose; drawn once, since drawing takes longer than all the rest.
at::Tensor noise(int rank, int64_t count, at::ScalarType type, int purpose = 0) {
  static const at::Tensor kDrawn = [] {
    at::Tensor values = at::empty({300'000}, at::kDouble);
    const Rng rng(1, "noise", 0);
    for (int64_t i = 0; i < values.numel(); ++i)
      values.mutable_data_ptr<double>()[i] = 3 * rng.normal(uint64_t(i));
    return values;
  }();
  return kDrawn.narrow(0, rank * 1009 + purpose * 11, count).to(type, false, /*copy=*/true);
}

}  // namespace

// Sizes: none, fewer elements than ranks, one message, cut into pieces with a ragged end.
TEST(Mpi, ReductionsHaveTheBitsOfLocal) {
  auto reduce_all = [](Communicator& comm, at::ScalarType type, ReduceOp op, Results& results) {
    const int n = comm.size(), me = comm.rank();
    for (const int64_t count : {0, 1, 70, 20'011}) {
      const at::Tensor everywhere = noise(me, count, type), at_root = noise(me, count, type, 1);
      const at::Tensor even = at::empty({count}, type), uneven = at::empty({me * count}, type);
      Results pieces;
      for (int r = 0; r < n; ++r) pieces.push_back(noise(me, r * count, type, r));
      comm.all_reduce(everywhere, op).wait();
      comm.reduce(at_root, n - 1, op).wait();
      comm.reduce_scatter(even, noise(me, count * n, type, 2), op).wait();
      comm.reduce_scatter(uneven, pieces, op).wait();
      results.insert(results.end(), {everywhere, at_root, even, uneven});
    }
  };
  expect_as_local([&](Communicator& comm) {
    Results results;
    for (const auto type : {at::kByte, at::kLong, at::kUInt16, at::kBool, at::kHalf, at::kBFloat16,
                            at::kFloat, at::kDouble, at::kComplexFloat})
      for (const auto op :
           {ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
        const bool ordered = op == ReduceOp::Min || op == ReduceOp::Max;
        if (op == ReduceOp::Mean && at::isIntegralType(type, true)) continue;
        if (ordered && at::isComplexType(type)) continue;
        reduce_all(comm, type, op, results);
      }
    return results;
  });
}

TEST(Mpi, MovesGiveWhatLocalGives) {
  for (const int64_t count : {0, 1, 5, 70'007}) {  // the last is broadcast in pieces
    expect_as_local([&](Communicator& comm) {
      const int n = comm.size(), me = comm.rank();
      auto some = [&](int64_t c, int what) { return noise(me, c, at::kFloat, what); };
      Results results;
      auto blank = [&](int64_t c) { return results.emplace_back(at::full({c}, -1, at::kFloat)); };
      for (int root = 0; root < n; ++root) {
        comm.broadcast(results.emplace_back(some(count, 1)), root).wait();
        Results parts, gathered;
        for (int r = 0; r < n; ++r) {
          if (me == root) parts.push_back(some(count + r, r));
          if (me == root) gathered.push_back(blank(count * r));
        }
        comm.scatter(blank(count + me), parts, root).wait();
        comm.gather(gathered, some(count * me, 2), root).wait();
      }
      const at::Tensor all = blank(count * n), mine = all.narrow(0, count * me, count);
      mine.copy_(some(count, 3));
      comm.all_gather(all, mine).wait();  // in place
      Results ragged, given, taken;
      for (int r = 0; r < n; ++r) {
        ragged.push_back(blank(r + count));
        given.push_back(some(me + r + count, r));
        taken.push_back(blank(me + r + count));
      }
      comm.all_gather(ragged, some(me + count, 4)).wait();
      comm.all_to_all(taken, given).wait();
      return results;
    });
  }
}

TEST(Mpi, StridedTensorsInFlightTakeEffectInOrder) {
  expect_as_local([](Communicator& comm) {
    const at::Tensor tensor = noise(comm.rank(), 20'000, at::kFloat).view({100, 200}).t();
    std::vector<Work> works;
    for (int i = 0; i < 6; ++i) {
      works.push_back(comm.all_reduce(tensor));
      works.push_back(comm.broadcast(tensor.narrow(0, 0, 70), i % comm.size()));
      works.push_back(comm.all_reduce(tensor.narrow(1, 3, 2), ReduceOp::Mean));
    }
    works.back().wait();
    for (const auto& work : works) EXPECT_TRUE(work.done());
    return Results{tensor};
  });
}

TEST(Mpi, MessagesPassEachOtherInBothDirections) {
  expect_as_local([](Communicator& comm) {
    using Direction = Communicator::Message::Direction;
    Results results;
    std::vector<Communicator::Message> messages;
    for (const int64_t count : {3, 0, 100'000, 7})
      for (int peer = 0; peer < comm.size(); ++peer) {  // itself included
        messages.push_back({Direction::Send, noise(comm.rank(), count, at::kFloat), peer});
        messages.push_back(
            {Direction::Recv, results.emplace_back(at::full({count}, -1, at::kFloat)), peer});
      }
    if (comm.rank() % 2 == 1)  // the odd ones receive first
      std::ranges::stable_partition(messages,
                                    [](auto& m) { return m.direction == Direction::Recv; });
    comm.group(messages).wait();
    return results;
  });
}

// A rank that waits in one group moves what it owes to another; each group keeps its own order.
TEST(Mpi, GroupsOfTheSameRanksAreApart) {
  run([](Communicator& comm) {
    const int n = comm.size(), me = comm.rank();
    const Communicator twin = comm.split(0, me), reversed = comm.split(0, -me);
    const Communicator half = comm.split(me % 2, me), rest = comm.split(me == 0 ? -1 : 4, 0);
    EXPECT_EQ(twin.name(), "world/0.0");
    EXPECT_EQ(half.name(), "world/2." + std::to_string(me % 2));
    EXPECT_EQ(bool(rest), me != 0);
    EXPECT_EQ(reversed.rank(), n - 1 - me);
    const Communicator nested = half.split(0, -half.rank());
    EXPECT_EQ(nested.rank(), half.size() - 1 - half.rank());
    const at::Tensor a = at::full({9000}, 1.0), b = at::full({9000}, 2.0), c = at::full({3}, me);
    std::vector<Work> works;
    // Not in the same order on all ranks.
    if (me % 2 == 0) works.push_back(comm.all_reduce(a));
    works.push_back(twin.all_reduce(b));
    works.push_back(nested.broadcast(c, 0));
    if (me % 2 == 1) works.push_back(comm.all_reduce(a));
    for (const auto& work : works) work.wait();
    EXPECT_TRUE(at::equal(a, at::full({9000}, double(n))));
    EXPECT_TRUE(at::equal(b, at::full({9000}, 2.0 * n)));
    EXPECT_EQ(c[0].item<int>(), me % 2 + 2 * (half.size() - 1));
  });
}

TEST(Mpi, AskingAgainAndAgainIsEnough) {
  run([](Communicator& comm) {
    const at::Tensor tensor = at::full({50'000}, 1.0f);
    const Work work = comm.all_reduce(tensor);
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (!work.done() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_TRUE(work.done());
    EXPECT_TRUE(at::equal(tensor, at::full({50'000}, float(comm.size()))));
  });
}

// Nobody waits for the works; still what a peer needs gets to it before this rank is gone.
TEST(Mpi, DroppedWorkIsSeenThrough) {
  for (int repeat = 0; repeat < 20; ++repeat)
    run([&](Communicator& comm) {
      const at::Tensor tensor = at::full({50'000}, 1.0f);
      const Work work = comm.all_reduce(tensor);
      if (comm.rank() != repeat % comm.size()) return;
      work.wait();
      EXPECT_TRUE(at::equal(tensor, at::full({50'000}, float(comm.size()))));
    });
}

TEST(MpiSlow, MoreThanTwoToThe31BytesGoInOneMessage) {
  run([](Communicator& comm) {
    const int64_t count = (int64_t{1} << 31) + 100;
    const at::Tensor tensor = at::full({count}, comm.rank(), at::kByte);
    tensor[count - 1].fill_(comm.rank() + 10);
    comm.broadcast(tensor, comm.size() - 1).wait();
    EXPECT_EQ(tensor[count - 2].item<int>(), comm.size() - 1);
    EXPECT_EQ(tensor[count - 1].item<int>(), comm.size() + 9);
  });
}

TEST(Mpi, SharesTheTextOfProcess0) {
  EXPECT_EQ(mpi_backend().share(mpi_rank() == 0 ? "host:4711" : "nothing"), "host:4711");
}

TEST(Mpi, RefusesAWorldThatIsNotTheLaunchers) {
  auto refused = [](Membership members, const std::string& words) {
    const auto world = std::make_shared<World>(std::move(members), WorldOptions{});
    try {
      mpi_backend().connect(world, {});
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Kind::Usage);
      expect_text(error.what(), words);
    }
  };
  const auto store = make_memory_store();
  refused({std::vector<Place>(2), 0, 2, store}, "one rank in each process, and this one has 2");
  refused({std::vector<Place>(9), 0, 1, store}, "this process is rank 0 of 9, but MPI has it as");
}

// Everything below fails a world, after which MPI is not ended properly.

TEST(MpiFailure, CheckNamesBothCallsBeforeAnythingIsWritten) {
  if (mpi_size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const at::Tensor tensor = at::full({4}, 5.0f);
  const std::string text = failure_of(
      [&](Communicator& comm) {
        EXPECT_TRUE(comm.capabilities().checks_before_data_moves);
        comm.barrier();
        comm.all_reduce(tensor).wait();
        comm.all_reduce(comm.rank() == 1 ? tensor : tensor.narrow(0, 0, 3)).wait();
      },
      {.timeout = 30s, .check = true});
  expect_text(text,
              "the shapes differ: rank 1 called all_reduce(sum, float32 [4]), rank 0 called "
              "all_reduce(sum, float32 [3]), both as operation #2 on world");
  EXPECT_TRUE(at::equal(tensor, at::full({4}, 5.0f * float(mpi_size()))));
}

TEST(MpiFailure, UncheckedDisagreementEndsAtTheDeadlineAtTheLatest) {
  if (mpi_size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const std::string sizes = failure_of(
      [&](Communicator& comm) {
        if (comm.rank() == 1)
          comm.all_reduce(at::full({4}, 1.0f)).wait();
        else
          comm.all_reduce(at::full({3}, 1.0f)).wait();
      },
      {.timeout = 2s});
  expect_text(sizes, "all_reduce #0 on world");
  const std::string kinds = failure_of(
      [&](Communicator& comm) {
        if (comm.rank() == 1)
          comm.barrier();
        else
          comm.all_reduce(at::full({4}, 1.0f)).wait();
        comm.barrier();
      },
      {.timeout = 2s});
  expect_text(kinds, "waited 2 s");
}

TEST(MpiFailure, AMessageOfTheWrongSizeIsNeverDelivered) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  const at::Tensor inbox = at::full({3}, -1.0f);
  const std::string text = failure_of(
      [&](Communicator& comm) {
        if (comm.rank() == 0) comm.send(at::full({4}, 7.0f), 1).wait();
        if (comm.rank() == 1) comm.recv(inbox, 0).wait();
        if (comm.rank() > 1) comm.barrier();
      },
      {.timeout = 2s});
  if (mpi_rank() == 1)
    expect_text(text,
                "the sizes differ: rank 1 called recv(float32 [3], from rank 0), rank 0 called "
                "send(float32 [4], to rank 1), both as message #0 of their pair on world");
  EXPECT_TRUE(at::equal(inbox, at::full({3}, -1.0f)));
}

TEST(MpiFailure, WhoNeverComesIsNamedAtTheDeadline) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  const std::string text = failure_of(
      [&](Communicator& comm) {
        comm.barrier();
        if (comm.rank() == 1) fail(Kind::Cancelled, "not today");
        comm.all_reduce(at::full({4}, 1.0f)).wait();
      },
      {.timeout = 2s});
  expect_text(text,
              mpi_rank() == 1 ? "not today" : "2 s (run.timeout_s) for all_reduce #1 on world");
}

// That it has left is told by a side channel, whose part this test plays.
TEST(MpiFailure, ARankThatReturnedIsNotAwaited) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  const at::Tensor tensor = at::full({9}, 1.0f);
  const std::vector<std::pair<std::string, std::function<void(Communicator&)>>> calls{
      {"barrier #0", [](Communicator& comm) { comm.barrier(); }},
      {"recv #0 from rank 1", [&](Communicator& comm) { comm.recv(tensor, 1).wait(); }},
      {"send #0 to rank 1", [&](Communicator& comm) { comm.send(tensor, 1).wait(); }}};
  for (const auto& [name, call] : calls) {
    std::shared_ptr<World> world;
    const std::string text = failure_of(
        [&](Communicator& comm) {
          if (comm.rank() == 1) return;
          world->leave(1);
          call(comm);
        },
        {.timeout = 30s}, [&](std::shared_ptr<World> made) { world = std::move(made); });
    if (mpi_rank() != 1)
      expect_text(text, cat(name, " on world: rank ", mpi_rank(),
                            " waits for rank 1, which has returned without joining"));
  }
}

TEST(MpiFailure, AbortFromAnotherThreadEndsTheWait) {
  const std::string text = failure_of(
      [&](Communicator& comm) {
        const std::jthread outsider([comm] { comm.abort("the button"); });
        comm.recv(at::full({1}, 0.0f), comm.rank()).wait();
      },
      {.timeout = 30s});
  expect_text(text, "aborted by rank " + std::to_string(mpi_rank()) + ": the button");
}

BackendFactory launched_backend() { return mpi_backend(); }

}  // namespace yoke::comm

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  yoke::comm::mpi_backend().share("");  // starts MPI
  const int result = RUN_ALL_TESTS();
  // Only here is it known that all processes are still there although worlds have failed.
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0) MPI_Finalize();
  return result;
}
