// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_comm.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "yoke/base/error.h"
#include "yoke/comm/run_ranks.h"

namespace yoke::cli {
namespace {

using comm::Communicator;
using Call = std::function<void()>;

constexpr int kMinRepeats = 7, kMaxRepeats = 20'000;

// One rank's side of an operation on buffers of its own: how to call it, and whether the result is
// right.
struct Subject {
  Call prepare = [] {};  // before the samples
  Call call;
  std::function<bool()> right;
};

// Small whole numbers, which no reduction of a few ranks rounds.
at::Tensor pattern(int64_t count, int rank, int size) {
  return at::arange(count, at::kLong)
      .remainder(997)
      .to(at::kFloat)
      .add_(float(rank))
      .remainder_(float(1000 + size));
}

Subject subject(Communicator& comm, const std::string& op, uint64_t bytes) {
  const int n = comm.size(), me = comm.rank();
  const int64_t piece = std::max<int64_t>(1, int64_t(bytes) / 4 / n),
                count = std::max<int64_t>(1, int64_t(bytes) / 4);
  auto from = [n](int64_t how_many, int rank) { return pattern(how_many, rank, n); };
  auto sum = [n, from](int64_t how_many) {
    at::Tensor total = from(how_many, 0);
    for (int r = 1; r < n; ++r) total.add_(from(how_many, r));
    return total;
  };
  auto equals = [](const at::Tensor& got, const at::Tensor& want) {
    return [got, want] { return at::equal(got, want); };
  };
  if (op == "all_reduce" || op == "reduce") {
    const at::Tensor buffer = comm.allocate({count}, at::kFloat);
    auto reset = [=] { buffer.copy_(from(count, me)); };
    const at::Tensor want = op == "all_reduce" || me == 0 ? sum(count) : from(count, me);
    auto call = [=] { (op == "reduce" ? comm.reduce(buffer, 0) : comm.all_reduce(buffer)).wait(); };
    return {reset, call, equals(buffer, want)};
  }
  if (op == "broadcast") {
    const at::Tensor buffer = comm.allocate({count}, at::kFloat);
    return {[=] { buffer.copy_(from(count, me)); }, [=] { comm.broadcast(buffer, 0).wait(); },
            equals(buffer, from(count, 0))};
  }
  const int64_t total = piece * n;
  if (op == "all_gather") {
    const at::Tensor output = comm.allocate({total}, at::kFloat);
    const at::Tensor input = output.narrow(0, me * piece, piece);  // in its place among the results
    std::vector<at::Tensor> all;
    for (int r = 0; r < n; ++r) all.push_back(from(piece, r));
    return {[=] { output.zero_(), input.copy_(from(piece, me)); },
            [=] { comm.all_gather(output, input).wait(); }, equals(output, at::cat(all))};
  }
  if (op == "reduce_scatter") {
    const at::Tensor input = comm.allocate({total}, at::kFloat);
    const at::Tensor output = comm.allocate({piece}, at::kFloat);
    return {[=] { input.copy_(from(total, me)); },
            [=] { comm.reduce_scatter(output, input).wait(); },
            equals(output, sum(total).narrow(0, me * piece, piece))};
  }
  const at::Tensor input = from(total, me),
                   output = comm.allocate({total}, at::kFloat);  // all_to_all
  std::vector<at::Tensor> all;
  for (int r = 0; r < n; ++r) all.push_back(from(total, r).narrow(0, me * piece, piece));
  const auto ins = input.view({n, piece}).unbind(), outs = output.view({n, piece}).unbind();
  return {[] {}, [=] { comm.all_to_all(outs, ins).wait(); }, equals(output, at::cat(all))};
}

uint64_t moved_bytes(const std::string& op, int ranks, uint64_t bytes) {
  const bool pieces = op == "all_gather" || op == "reduce_scatter" || op == "all_to_all";
  return pieces ? std::max<uint64_t>(1, bytes / 4 / uint64_t(ranks)) * 4 * uint64_t(ranks)
                : std::max<uint64_t>(1, bytes / 4) * 4;
}

// Times a subject on all ranks until the time is filled; every rank takes part in every sample.
BenchLine measure(const BenchComm& bench, uint64_t bytes, const std::string& name,
                  const std::function<Subject(Communicator&)>& make) {
  std::vector<double> samples;
  bool verified = true;
  comm::run_ranks(bench.ranks,
                  [&](Communicator& comm) {
                    const Subject subject = make(comm);
                    auto check = [&] {
                      subject.prepare();
                      comm.barrier();
                      subject.call();
                      const at::Tensor right = at::full({1}, subject.right() ? 1 : 0, at::kInt);
                      comm.all_reduce(right, comm::ReduceOp::Min).wait();
                      if (comm.rank() == 0) verified = verified && right.item<int>() == 1;
                    };
                    auto sample = [&] {
                      comm.barrier();
                      const auto start = std::chrono::steady_clock::now();
                      subject.call();
                      const std::chrono::duration<double, std::micro> mine =
                          std::chrono::steady_clock::now() - start;
                      const at::Tensor slowest = at::full({1}, mine.count(), at::kDouble);
                      comm.all_reduce(slowest, comm::ReduceOp::Max).wait();
                      return slowest.item<double>();
                    };
                    check();
                    double warm = 0;
                    for (int i = 0; i < 3; ++i) warm = sample();
                    // A whole round also has a barrier and a small reduction.
                    const int repeats = std::clamp(int(bench.seconds_per_size * 1e6 / (warm + 10)),
                                                   kMinRepeats, kMaxRepeats);
                    for (int i = 0; i < repeats; ++i) {
                      const double us = sample();
                      if (comm.rank() == 0) samples.push_back(us);
                    }
                    check();
                  },
                  {.threads_per_rank = 1, .pin = true});
  std::ranges::sort(samples);
  auto at_share = [&](double share) { return samples[size_t(share * double(samples.size() - 1))]; };
  BenchLine line{.backend = name,
                 .op = bench.op,
                 .ranks = bench.ranks,
                 .bytes = moved_bytes(bench.op, bench.ranks, bytes)};
  line.median_us = at_share(0.5);
  line.p10_us = at_share(0.1);
  line.p90_us = at_share(0.9);
  line.alg_gbps = double(line.bytes) / line.median_us / 1e3;
  line.bus_gbps = line.alg_gbps * bus_factor(bench.op, bench.ranks);
  line.repeats = int(samples.size());
  line.verified = verified;
  return line;
}

}  // namespace

const std::vector<std::string>& bench_ops() {
  static const std::vector<std::string> kOps{"all_reduce", "all_gather", "reduce_scatter",
                                             "broadcast",  "reduce",     "all_to_all"};
  return kOps;
}

double bus_factor(const std::string& op, int ranks) {
  const double n = ranks;
  if (op == "all_reduce") return 2 * (n - 1) / n;
  if (op == "broadcast" || op == "reduce" || op == "memcpy") return 1;
  return (n - 1) / n;
}

BenchLine bench_local(const BenchComm& bench, uint64_t bytes) {
  return measure(bench, bytes, "local",
                 [&](Communicator& comm) { return subject(comm, bench.op, bytes); });
}

BenchLine bench_memcpy(const BenchComm& bench, uint64_t bytes) {
  BenchComm copy = bench;
  copy.op = "memcpy";
  return measure(copy, bytes, "memcpy", [&](Communicator& comm) -> Subject {
    const int64_t count = std::max<int64_t>(1, int64_t(bytes) / 4);
    const at::Tensor source = comm.allocate({count}, at::kFloat);
    const at::Tensor target = comm.allocate({count}, at::kFloat);
    source.copy_(pattern(count, comm.rank(), comm.size()));
    return {
        [=] { target.zero_(); },
        [=] { std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes()); },
        [=] { return at::equal(source, target); }};
  });
}

}  // namespace yoke::cli
