// SPDX-License-Identifier: Apache-2.0
// The contract of communicator.h: operations in flight, messages, groups and handles.
#include <thread>

#include "yoke/base/rng.h"
#include "yoke/comm/contract_test.h"

namespace yoke::comm {

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

}  // namespace yoke::comm
