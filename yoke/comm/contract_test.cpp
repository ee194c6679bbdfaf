// SPDX-License-Identifier: Apache-2.0
// The contract of communicator.h: what the collectives give; and the cases it is tested for.
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
