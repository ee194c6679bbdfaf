// SPDX-License-Identifier: Apache-2.0
// The contract of communicator.h: what the operations give.
#include "yoke/comm/contract_test.h"

#include <unistd.h>

#include <bit>
#include <cmath>
#include <thread>

#include "yoke/base/rng.h"
#include "yoke/comm/shm/backend.h"

namespace yoke::comm {
namespace {

const std::vector<at::ScalarType> kReduced{
    at::kByte,     at::kChar,  at::kShort,  at::kInt,          at::kLong,         at::kHalf,
    at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};

}  // namespace

TEST_P(CommContract, KnowsRankSizeAndCapabilities) {
  std::atomic<int> ranks{0};
  run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), size());
    EXPECT_EQ(comm.name(), "world");
    EXPECT_TRUE(comm.capabilities().cpu || comm.capabilities().cuda);
    ranks += 1 << comm.rank();
  });
  EXPECT_EQ(std::popcount(unsigned(ranks)), here());
}

TEST_P(CommContract, AllReduceSumsEveryDtype) {
  run([&](Communicator& comm) {
    for (const auto type : kReduced) {
      const at::Tensor tensor = full({3, 2}, comm.rank() + 1, type);
      comm.all_reduce(tensor).wait();
      expect_equal(tensor, full({3, 2}, sum_of_ranks(size() + 1), type), c10::toString(type));
    }
  });
}

TEST_P(CommContract, EveryDtypeIsMoved) {
  run([&](Communicator& comm) {
    for (const auto type :
         {at::kBool, at::kUInt16, at::kUInt64, at::kComplexHalf, at::kFloat8_e4m3fn}) {
      auto of_rank = [&](int rank) {
        const int64_t bytes = int64_t(c10::elementSize(type)) * 8;
        return (at::arange(bytes, options(at::kByte)) + rank).remainder_(2).view(type);
      };
      const at::Tensor tensor = of_rank(comm.rank()), all = at::empty({size() * 8}, options(type));
      comm.all_gather(all, tensor).wait();
      comm.broadcast(tensor, size() - 1).wait();
      expect_equal(tensor.view(at::kByte), of_rank(size() - 1).view(at::kByte),
                   c10::toString(type));
      for (int r = 0; r < size(); ++r)
        expect_equal(all.narrow(0, r * 8, 8).view(at::kByte), of_rank(r).view(at::kByte),
                     c10::toString(type));
    }
  });
}

TEST_P(CommContract, UnsignedTypesAreReducedOnTheCpu) {
  if (GetParam().device.is_cuda()) GTEST_SKIP() << "LibTorch has no CUDA arithmetic for them";
  run([&](Communicator& comm) {
    for (const auto type : {at::kUInt16, at::kUInt32, at::kUInt64}) {
      const at::Tensor tensor = full({4}, comm.rank() + 1, at::kLong).to(type);
      comm.all_reduce(tensor).wait();
      expect_equal(tensor.to(at::kLong), full({4}, sum_of_ranks(size() + 1), at::kLong),
                   c10::toString(type));
    }
  });
}

TEST_P(CommContract, AllReduceKnowsEveryReduction) {
  run([&](Communicator& comm) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
      auto reduced = [&](double mine, ReduceOp op) {
        const at::Tensor tensor = full({5}, mine, type);
        comm.all_reduce(tensor, op).wait();
        return tensor;
      };
      const int n = size(), r = comm.rank();
      expect_equal(reduced(r, ReduceOp::Min), full({5}, 0, type), "min");
      expect_equal(reduced(r, ReduceOp::Max), full({5}, n - 1, type), "max");
      expect_equal(reduced(2, ReduceOp::Product), full({5}, std::pow(2, n), type), "product");
      expect_equal(reduced(4 * r, ReduceOp::Mean), full({5}, 2 * (n - 1), type), "mean");
    }
  });
}

TEST_P(CommContract, BooleansReduceAsLogic) {
  run([&](Communicator& comm) {
    auto reduced = [&](bool mine, ReduceOp op) {
      const at::Tensor tensor = full({2}, mine, at::kBool);
      comm.all_reduce(tensor, op).wait();
      return tensor.cpu()[0].item<bool>();
    };
    const bool last = comm.rank() == size() - 1;
    EXPECT_TRUE(reduced(last, ReduceOp::Sum));
    EXPECT_TRUE(reduced(last, ReduceOp::Max));
    EXPECT_EQ(reduced(!last, ReduceOp::Min), false);
    EXPECT_EQ(reduced(!last, ReduceOp::Product), false);
  });
}

TEST_P(CommContract, MinAndMaxPassNanOn) {
  run([&](Communicator& comm) {
    for (const auto op : {ReduceOp::Min, ReduceOp::Max}) {
      const at::Tensor tensor = full({3}, comm.rank());
      if (comm.rank() == size() / 2) tensor[1].fill_(NAN);
      comm.all_reduce(tensor, op).wait();
      expect_equal(tensor.isnan().to(at::kInt), at::tensor({0, 1, 0}, at::kInt));
    }
  });
}

TEST_P(CommContract, SumsAreMadeInRankOrderBitForBit) {
  constexpr int64_t kCount = 100'003;  // many items, and a ragged end
  auto contribution = [&](int rank) {
    at::Tensor values = at::empty({kCount}, at::kFloat);
    const Rng rng(7, "contribution", uint64_t(rank));
    for (int64_t i = 0; i < kCount; ++i)
      values.mutable_data_ptr<float>()[i] = float(rng.normal(uint64_t(i)));
    return values;
  };
  at::Tensor want = contribution(0);
  for (int r = 1; r < size(); ++r) want = want + contribution(r);
  for (int repeat = 0; repeat < 2; ++repeat) {
    run([&](Communicator& comm) {
      const at::Tensor tensor = contribution(comm.rank()).to(GetParam().device);
      comm.all_reduce(tensor).wait();
      const bool in_order = comm.capabilities().sums_in_rank_order;
      EXPECT_TRUE(in_order ? at::equal(tensor.cpu(), want)
                           : at::allclose(tensor.cpu(), want, 1e-5, 1e-5))
          << "rank " << comm.rank();
    });
  }
}

TEST_P(CommContract, BroadcastComesFromEveryRoot) {
  run([&](Communicator& comm) {
    for (int root = 0; root < size(); ++root) {
      const at::Tensor tensor = range(comm.rank() * 100, 10, at::kLong);
      comm.broadcast(tensor, root).wait();
      expect_equal(tensor, range(root * 100, 10, at::kLong));
    }
  });
}

TEST_P(CommContract, ReduceWritesTheRootAlone) {
  run([&](Communicator& comm) {
    for (int root = 0; root < size(); ++root) {
      const at::Tensor tensor = full({4}, comm.rank());
      comm.reduce(tensor, root).wait();
      expect_equal(tensor, full({4}, comm.rank() == root ? sum_of_ranks(size()) : comm.rank()));
    }
  });
}

TEST_P(CommContract, AllGatherKeepsRankOrder) {
  run([&](Communicator& comm) {
    const at::Tensor output = full({size() * 3}, -1);
    comm.all_gather(output, range(comm.rank() * 3, 3)).wait();
    expect_equal(output, range(0, size() * 3));
  });
}

TEST_P(CommContract, AllGatherWorksInPlace) {
  run([&](Communicator& comm) {
    const at::Tensor output = full({size() * 3}, -1);
    output.narrow(0, comm.rank() * 3, 3).copy_(range(comm.rank() * 3, 3));
    comm.all_gather(output, output.narrow(0, comm.rank() * 3, 3)).wait();
    expect_equal(output, range(0, size() * 3));
  });
}

TEST_P(CommContract, ReduceScatterGivesEachRankItsPart) {
  run([&](Communicator& comm) {
    const at::Tensor output = full({2}, -1);
    comm.reduce_scatter(output, range(0, size() * 2) + comm.rank()).wait();
    expect_equal(output, range(comm.rank() * 2, 2) * size() + sum_of_ranks(size()));
  });
}

TEST_P(CommContract, ReduceScatterWorksInPlace) {
  run([&](Communicator& comm) {
    const at::Tensor input = range(0, size() * 2) + comm.rank();
    const at::Tensor output = input.narrow(0, comm.rank() * 2, 2);
    comm.reduce_scatter(output, input).wait();
    expect_equal(output, range(comm.rank() * 2, 2) * size() + sum_of_ranks(size()));
  });
}

// Rank r holds r elements, so rank 0 holds none.
TEST_P(CommContract, UnevenPiecesFindTheirPlaces) {
  run([&](Communicator& comm) {
    const int n = size(), me = comm.rank();
    auto empties = [&](auto count_of) {
      std::vector<at::Tensor> pieces;
      for (int r = 0; r < n; ++r) pieces.push_back(full({count_of(r)}, -1));
      return pieces;
    };
    auto gathered = empties([](int r) { return r; });
    comm.all_gather(gathered, full({me}, me)).wait();
    for (int r = 0; r < n; ++r) expect_equal(gathered[size_t(r)], full({r}, r), "all_gather");

    std::vector<at::Tensor> contributions;
    for (int r = 0; r < n; ++r) contributions.push_back(full({r}, me + 10 * r));
    const at::Tensor reduced = full({me}, -1);
    comm.reduce_scatter(reduced, contributions).wait();
    expect_equal(reduced, full({me}, sum_of_ranks(n) + 10.0 * me * n), "reduce_scatter");

    const int root = n - 1;
    auto at_root = me == root ? empties([](int r) { return r; }) : std::vector<at::Tensor>{};
    comm.gather(at_root, full({me}, me), root).wait();
    for (size_t r = 0; r < at_root.size(); ++r)
      expect_equal(at_root[r], full({int64_t(r)}, double(r)), "gather");

    const at::Tensor scattered = full({me}, -1);
    comm.scatter(scattered, me == root ? contributions : std::vector<at::Tensor>{}, root).wait();
    expect_equal(scattered, full({me}, root + 10 * me), "scatter");

    std::vector<at::Tensor> given, taken = empties([&](int s) { return s + me; });
    for (int r = 0; r < n; ++r) given.push_back(full({me + r}, me * 100 + r));
    comm.all_to_all(taken, given).wait();
    for (int s = 0; s < n; ++s)
      expect_equal(taken[size_t(s)], full({s + me}, s * 100 + me), "all_to_all");
  });
}

TEST_P(CommContract, EmptyTensorsPassThroughEverything) {
  run([&](Communicator& comm) {
    const at::Tensor none = full({0, 3}, 0);
    comm.all_reduce(none).wait();
    comm.broadcast(none, 0).wait();
    comm.all_gather(none, none).wait();
    comm.reduce_scatter(none, none).wait();
    const int next = (comm.rank() + 1) % size(), previous = (comm.rank() + size() - 1) % size();
    comm.group({{Communicator::Message::Direction::Send, none, next},
                {Communicator::Message::Direction::Recv, none, previous}})
        .wait();
    comm.barrier();
  });
}

TEST_P(CommContract, TensorsNeedNotBeContiguous) {
  run([&](Communicator& comm) {
    const int me = comm.rank(), n = size();
    auto columns = [&](double value) {
      return full({4, 6}, value).t().narrow(0, 1, 3);
    };  // [3, 4], strided
    const at::Tensor reduced = columns(me);
    ASSERT_FALSE(reduced.is_contiguous());
    comm.all_reduce(reduced).wait();
    expect_equal(reduced, full({3, 4}, sum_of_ranks(n)), "all_reduce");

    const at::Tensor sent = columns(me);
    comm.broadcast(sent, n - 1).wait();
    expect_equal(sent, full({3, 4}, n - 1), "broadcast");

    const at::Tensor wide = at::full({2, n * 3}, -1, options()).t();  // [3n, 2], strided
    comm.all_gather(wide, range(0, 12).view({6, 2}).narrow(0, 0, 3) + me * 100).wait();
    for (int r = 0; r < n; ++r)
      expect_equal(wide.narrow(0, r * 3, 3), range(0, 6).view({3, 2}) + r * 100, "all_gather");

    const at::Tensor inbox = columns(-1);
    comm.group({{Communicator::Message::Direction::Recv, inbox, (me + n - 1) % n},
                {Communicator::Message::Direction::Send, columns(me), (me + 1) % n}})
        .wait();
    expect_equal(inbox, full({3, 4}, (me + n - 1) % n), "send and recv");
  });
}

TEST_P(CommContract, LazyConjugatesAreSentAsTheirValue) {
  run([&](Communicator& comm) {
    const at::Tensor value = at::complex(full({3}, comm.rank()), full({3}, 1));
    const at::Tensor conjugate = value.conj();
    comm.all_reduce(conjugate).wait();
    expect_equal(conjugate.resolve_conj(),
                 at::complex(full({3}, sum_of_ranks(size())), full({3}, -size())));
  });
}

TEST_P(CommContract, OperationsInFlightTakeEffectInOrder) {
  run([&](Communicator& comm) {
    const at::Tensor tensor = full({1000}, 1, at::kDouble),
                     strided = full({4, 6}, 1, at::kDouble).t();
    std::vector<Work> works;
    for (int i = 0; i < 10; ++i) {
      works.push_back(comm.all_reduce(tensor, ReduceOp::Sum));
      works.push_back(comm.all_reduce(strided, ReduceOp::Sum));
      works.push_back(comm.broadcast(tensor, i % size()));
    }
    for (const auto& work : works) work.wait();
    expect_equal(tensor, full({1000}, std::pow(size(), 10), at::kDouble));
    expect_equal(strided, full({6, 4}, std::pow(size(), 10), at::kDouble));
    works.back().synchronize();
    EXPECT_TRUE(works.back().done());
  });
}

TEST_P(CommContract, WorkMayBeAwaitedInAnyOrderOrDropped) {
  run([&](Communicator& comm) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(full({300}, i + comm.rank()));
      const Work work = comm.all_reduce(tensors.back());
      if (i % 3 != 0) works.push_back(work);
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
    comm.all_reduce(full({1}, 0)).wait();  // comes after the dropped ones
    for (int i = 0; i < 20; ++i)
      expect_equal(tensors[size_t(i)], full({300}, i * size() + sum_of_ranks(size())));
  });
}

TEST_P(CommContract, MessagesOfAPairArriveInOrder) {
  run([&](Communicator& comm) {
    const int next = (comm.rank() + 1) % size(), previous = (comm.rank() + size() - 1) % size();
    std::vector<at::Tensor> received;
    std::vector<Work> works;
    auto send_all = [&] {
      for (int i = 0; i < 8; ++i)
        works.push_back(comm.send(full({i + 1}, comm.rank() * 100 + i), next));
    };
    for (int i = 0; i < 8; ++i) received.push_back(full({i + 1}, -1));
    // Where messages do not overtake each other, somebody in the ring must receive first.
    const bool recv_first =
        !comm.capabilities().messages_overtake && comm.rank() == 0 && size() > 1;
    if (!recv_first) send_all();
    for (int i = 0; i < 8; ++i) comm.recv(received[size_t(i)], previous).wait();
    if (recv_first) send_all();
    for (const auto& work : works) work.wait();
    for (int i = 0; i < 8; ++i)
      expect_equal(received[size_t(i)], full({i + 1}, previous * 100 + i));
  });
}

TEST_P(CommContract, AGroupOfMessagesHasNoWrongOrder) {
  run([&](Communicator& comm) {
    using Direction = Communicator::Message::Direction;
    std::vector<Communicator::Message> messages;
    std::vector<at::Tensor> inbox;
    for (int r = 0; r < size(); ++r) inbox.push_back(full({4}, -1));
    // Even ranks send first, odd ones receive first; everybody with everybody, itself included.
    for (const auto direction : {comm.rank() % 2 == 0 ? Direction::Send : Direction::Recv,
                                 comm.rank() % 2 == 0 ? Direction::Recv : Direction::Send})
      for (int r = 0; r < size(); ++r)
        messages.push_back(
            {direction,
             direction == Direction::Send ? full({4}, comm.rank() * 10 + r) : inbox[size_t(r)], r});
    comm.group(messages).wait();
    for (int r = 0; r < size(); ++r)
      expect_equal(inbox[size_t(r)], full({4}, r * 10 + comm.rank()));
  });
}

TEST_P(CommContract, SplitOrdersByKeyAndSplitsAgain) {
  run([&](Communicator& comm) {
    const Communicator half = comm.split(comm.rank() % 2, -comm.rank());  // reversed order
    const int expected_size = (size() + 1 - comm.rank() % 2) / 2;
    EXPECT_EQ(half.size(), expected_size);
    EXPECT_EQ(half.rank(), expected_size - 1 - comm.rank() / 2);
    const at::Tensor order = full({half.size()}, -1);
    half.all_gather(order, full({1}, comm.rank())).wait();
    for (int i = 0; i < half.size(); ++i)
      EXPECT_EQ(order.cpu()[i].item<float>(), comm.rank() % 2 + 2 * (expected_size - 1 - i));

    const Communicator first = half.split(half.rank() == 0 ? 0 : -1, 0);
    EXPECT_EQ(bool(first), half.rank() == 0);
    EXPECT_TRUE(!first || first.size() == 1);
    // The groups live side by side.
    const at::Tensor in_world = full({2}, 1), in_half = full({2}, 1);
    const Work a = comm.all_reduce(in_world), b = half.all_reduce(in_half);
    b.wait();
    a.wait();
    expect_equal(in_world, full({2}, size()));
    expect_equal(in_half, full({2}, half.size()));
  });
}

TEST_P(CommContract, AllocatedMemoryIsOrdinaryMemory) {
  run([&](Communicator& comm) {
    for (const int64_t rows : {0, 3, 500'000}) {
      const at::Tensor buffer = comm.allocate({rows, 4}, options());
      EXPECT_TRUE(buffer.is_contiguous());
      buffer.fill_(comm.rank());
      comm.all_reduce(buffer).wait();
      expect_equal(buffer, full({rows, 4}, sum_of_ranks(size())));
    }
  });
}

TEST_P(CommContract, LargeTensorsAreWholeAndShared) {
  run([&](Communicator& comm) {
    const int64_t count = 700'001;
    const at::Tensor tensor = range(0, count, at::kDouble) + comm.rank();
    comm.all_reduce(tensor).wait();
    expect_equal(tensor, range(0, count, at::kDouble) * size() + sum_of_ranks(size()));
  });
}

TEST_P(CommContract, BadArgumentsAreRefusedBeforeAnybodyWaits) {
  run([&](Communicator& comm) {
    auto refused = [](const std::function<void()>& call, const std::string& words) {
      try {
        call();
        ADD_FAILURE() << "accepted; wanted: " << words;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), Kind::Usage);
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      }
    };
    refused([&] { comm.broadcast(full({1}, 0), size()); }, "no rank");
    refused([&] { comm.send(full({1}, 0), -1); }, "no rank -1");
    refused([&] { comm.all_reduce(at::Tensor()); }, "undefined");
    refused([&] { comm.all_reduce(full({1}, 0, at::kLong), ReduceOp::Mean); }, "mean");
    refused([&] { comm.all_reduce(full({1}, 0, at::kComplexFloat), ReduceOp::Max); }, "max");
    refused([&] { comm.all_reduce(full({1}, 0).expand({3})); }, "share memory");
    refused([&] { comm.all_gather(full({size() * 2}, 0), full({1}, 0)); }, "elements");
    refused([&] { comm.all_to_all({}, {}); }, "one tensor for each");
    if (size() > 1)
      refused([&] { comm.reduce_scatter(full({1}, 0), full({size() + 1}, 0)); }, "do not divide");
    const std::vector<at::Tensor> pieces(size_t(size()), full({1}, 0));
    refused([&] { comm.all_to_all(pieces, pieces); }, "overlap");
    comm.barrier();  // the group is as good as before
  });
}

TEST_P(CommContract, HandlesMayBeDestroyedInAnyOrder) {
  for (int variant = 0; variant < 3; ++variant) {
    run([&](Communicator& comm) {
      Communicator part = comm.split(0, comm.rank());
      const at::Tensor tensor = full({5000}, 1);
      Work work = part.all_reduce(tensor);
      if (variant == 0) part = {};  // the communicator before its work
      if (variant == 1) work = {};  // the work before the communicator
      if (variant == 2 && comm.rank() == 0) part = {}, comm = {};  // everything but the work
      work.wait();
      if (variant == 0) expect_equal(tensor, full({5000}, size()));
      if (variant != 2) comm.barrier();
    });
  }
}

// Ranks walk through the same random operations at their own pace; every value is known beforehand.
TEST_P(CommContract, RandomSequencesWithRandomDelaysGiveTheRightValues) {
  const int num_sequences = GetParam().device.is_cuda() ? 100 : 2000;  // times the five sizes
  std::vector<std::atomic<uint64_t>> issued(static_cast<size_t>(size()));
  const WorldOptions delayed{.timeout = 120s, .before_issue = [&](int rank, OpKind) {
                               const Rng rng(11, "delay", uint64_t(rank));
                               const uint32_t dice = rng.bits(issued[size_t(rank)]++) % 64;
                               if (dice == 0) std::this_thread::sleep_for(20us);
                               if (dice < 8) std::this_thread::yield();
                             }};
  run(
      [&](Communicator& comm) {
        const int n = size(), me = comm.rank();
        for (int sequence = 0; sequence < num_sequences; ++sequence) {
          const Rng rng(5, "sequence", uint64_t(sequence));  // the same on all ranks
          std::vector<std::tuple<Work, at::Tensor, at::Tensor>> flying;
          const int length = 1 + int(rng.below(0, 6));
          for (int i = 0; i < length; ++i) {
            const int64_t count =
                int64_t(rng.below(uint64_t(100 + i), 5) == 0 ? rng.below(uint64_t(200 + i), 40000)
                                                             : rng.below(uint64_t(300 + i), 50));
            const int root = int(rng.below(uint64_t(400 + i), uint64_t(n)));
            const double seed = double(sequence % 100) * 10 + i;
            auto value = [&](int rank) { return seed + rank * 1000; };
            const double sum = n * seed + 1000 * sum_of_ranks(n);
            switch (rng.below(uint64_t(500 + i), 6)) {
              case 0: {
                const at::Tensor t = full({count}, value(me), at::kDouble);
                flying.emplace_back(comm.all_reduce(t), t, full({count}, sum, at::kDouble));
                break;
              }
              case 1: {
                const at::Tensor t = full({count}, value(me), at::kDouble);
                flying.emplace_back(comm.broadcast(t, root), t,
                                    full({count}, value(root), at::kDouble));
                break;
              }
              case 2: {
                const at::Tensor t = full({n, count}, -1, at::kDouble);
                const at::Tensor want = (at::arange(n, options(at::kDouble)) * 1000 + seed)
                                            .unsqueeze(1)
                                            .expand({n, count});
                flying.emplace_back(comm.all_gather(t, full({count}, value(me), at::kDouble)), t,
                                    want);
                break;
              }
              case 3: {
                const at::Tensor t = full({count}, -1, at::kDouble);
                flying.emplace_back(
                    comm.reduce_scatter(t, full({n, count}, value(me), at::kDouble)), t,
                    full({count}, sum, at::kDouble));
                break;
              }
              case 4: {
                const at::Tensor t = full({count}, -1, at::kDouble);
                const int shift = 1 + root, from = (me + n * 8 - shift) % n;
                flying.emplace_back(
                    comm.group({{Communicator::Message::Direction::Recv, t, from},
                                {Communicator::Message::Direction::Send,
                                 full({count}, value(me), at::kDouble), (me + shift) % n}}),
                    t, full({count}, value(from), at::kDouble));
                break;
              }
              default: {
                const at::Tensor t = full({count}, value(me), at::kDouble);
                flying.emplace_back(comm.reduce(t, root), t,
                                    full({count}, me == root ? sum : value(me), at::kDouble));
              }
            }
            if (rng.below(uint64_t(600 + i), 3) == 0) std::get<0>(flying.back()).wait();
          }
          for (auto& [work, got, want] : flying) {
            work.wait();
            if (!at::equal(got, want))
              throw std::runtime_error("wrong value in sequence " + std::to_string(sequence));
          }
        }
      },
      delayed);
}

namespace {

std::vector<Case> cases(const std::string& name, at::Device device, const std::vector<int>& sizes,
                        const BackendFactory& backend = {}) {
  std::vector<Case> result;
  for (const int size : sizes) result.push_back({name, device, size, backend});
  return result;
}

// This process as one of several, if a launcher has started it so. YOKE_TEST_RANKS: rank threads.
std::vector<Case> launched_cases() {
  const auto environment = topo::environment_of(environ);
  const auto launch = topo::discover(environment);
  if (launch.world_size == 1) return {};
  const auto ranks = environment.find("YOKE_TEST_RANKS");
  const int here = ranks == environment.end() ? 1 : std::stoi(ranks->second);
  const auto backend = launched_backend();
  const at::Device device = backend.name == "nccl" ? at::Device(at::kCUDA, 0) : at::kCPU;
  return {{backend.name, device, launch.world_size * here, backend, launch, here}};
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  return info.param.name + std::to_string(info.param.size);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Local, CommContract,
                         testing::ValuesIn(cases("local", at::kCPU, {1, 2, 3, 4, 7})), name_of);
INSTANTIATE_TEST_SUITE_P(Shm, CommContract,
                         testing::ValuesIn(cases("shm", at::kCPU, {1, 2, 3, 4, 7}, shm_backend())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Launched, CommContract, testing::ValuesIn(launched_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, CommContract,
                         testing::ValuesIn(cases("local_cuda", at::Device(at::kCUDA, 0),
                                                 {1, 2, 4})),
                         name_of);
INSTANTIATE_TEST_SUITE_P(GpuNccl, CommContract,
                         testing::ValuesIn(cases("nccl", at::Device(at::kCUDA, 0), {1, 2, 3, 4},
                                                 nccl_backend({.file = nccl_file()}))),
                         name_of);

}  // namespace yoke::comm
