// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_comm.h"

#include <ATen/Functions.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/text.h"
#include "yoke/cli/program_mpi.h"
#include "yoke/cli/scratch.h"
#include "yoke/comm/nccl/backend.h"
#include "yoke/comm/run_processes.h"
#include "yoke/comm/run_world.h"
#include "yoke/comm/shm/backend.h"

namespace yoke::cli {
namespace {

using comm::Communicator;

constexpr int kMinRepeats = 7, kMaxRepeats = 20'000;
constexpr int kRow = 20;

// One rank's side of an operation on buffers of its own: how to call it, and whether the result is
// right.
struct Subject {
  std::function<void()> prepare = [] {};  // before the samples
  std::function<comm::Work()> call;
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

Subject subject(const Communicator& comm, const BenchComm& bench, uint64_t bytes) {
  const int n = comm.size(), me = comm.rank();
  const std::string& op = bench.op;
  const auto device = comm.capabilities().cpu ? at::Device(at::kCPU) : at::Device(at::kCUDA);
  const auto options = at::device(device).dtype(at::kFloat);
  auto allocate = [&](int64_t how_many) {
    return bench.plain ? at::empty({how_many}, options) : comm.allocate({how_many}, options);
  };
  const int64_t piece = std::max<int64_t>(1, int64_t(bytes) / 4 / n),
                count = std::max<int64_t>(1, int64_t(bytes) / 4);
  auto from = [n, device](int64_t how_many, int rank) {
    return pattern(how_many, rank, n).to(device);
  };
  auto sum = [n, from](int64_t how_many) {
    at::Tensor total = from(how_many, 0);
    for (int r = 1; r < n; ++r) total.add_(from(how_many, r));
    return total;
  };
  auto equals = [](const at::Tensor& got, const at::Tensor& want) {
    return [got, want] { return at::equal(got, want); };
  };
  if (op == "all_reduce" || op == "reduce") {
    const at::Tensor buffer = allocate(count);
    auto reset = [=] { buffer.copy_(from(count, me)); };
    const at::Tensor want = op == "all_reduce" || me == 0 ? sum(count) : from(count, me);
    auto call = [=] { return op == "reduce" ? comm.reduce(buffer, 0) : comm.all_reduce(buffer); };
    return {reset, call, equals(buffer, want)};
  }
  if (op == "broadcast") {
    const at::Tensor buffer = allocate(count);
    return {[=] { buffer.copy_(from(count, me)); }, [=] { return comm.broadcast(buffer, 0); },
            equals(buffer, from(count, 0))};
  }
  const int64_t total = piece * n;
  if (op == "all_gather") {
    const at::Tensor output = allocate(total);
    const at::Tensor input = output.narrow(0, me * piece, piece);  // in its place among the results
    std::vector<at::Tensor> all;
    for (int r = 0; r < n; ++r) all.push_back(from(piece, r));
    return {[=] { output.zero_(), input.copy_(from(piece, me)); },
            [=] { return comm.all_gather(output, input); }, equals(output, at::cat(all))};
  }
  if (op == "reduce_scatter") {
    const at::Tensor input = allocate(total);
    const at::Tensor output = allocate(piece);
    return {[=] { input.copy_(from(total, me)); },
            [=] { return comm.reduce_scatter(output, input); },
            equals(output, sum(total).narrow(0, me * piece, piece))};
  }
  const at::Tensor input = from(total, me), output = allocate(total);  // all_to_all
  std::vector<at::Tensor> all;
  for (int r = 0; r < n; ++r) all.push_back(from(total, r).narrow(0, me * piece, piece));
  const auto ins = input.view({n, piece}).unbind(), outs = output.view({n, piece}).unbind();
  return {[] {}, [=] { return comm.all_to_all(outs, ins); }, equals(output, at::cat(all))};
}

uint64_t moved_bytes(const std::string& op, int ranks, uint64_t bytes) {
  const bool pieces = op == "all_gather" || op == "reduce_scatter" || op == "all_to_all";
  return pieces ? std::max<uint64_t>(1, bytes / 4 / uint64_t(ranks)) * 4 * uint64_t(ranks)
                : std::max<uint64_t>(1, bytes / 4) * 4;
}

// Times a subject on all ranks until the time is filled; every rank takes part in every sample.
BenchLine measure(const Communicator& comm, const BenchComm& bench, uint64_t bytes,
                  const Subject& subject) {
  const bool on_cpu = comm.capabilities().cpu;
  // On a GPU as nccl-tests does it: calls in a row, then their common end.
  const int row = on_cpu ? 1 : kRow;
  const auto device = on_cpu ? at::Device(at::kCPU) : at::Device(at::kCUDA);
  std::vector<double> samples;
  bool verified = true;
  auto check = [&] {
    subject.prepare();
    comm.barrier();
    subject.call().wait();
    const at::Tensor right =
        at::full({1}, subject.right() ? 1 : 0, at::device(device).dtype(at::kInt));
    comm.all_reduce(right, comm::ReduceOp::Min).wait();
    verified = verified && right.item<int>() == 1;
  };
  const at::Tensor slowest = at::empty({1}, at::device(device).dtype(at::kDouble));
  auto sample = [&] {
    comm.barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; i < row; ++i) subject.call();
    subject.call().synchronize();
    const std::chrono::duration<double, std::micro> mine = std::chrono::steady_clock::now() - start;
    slowest.fill_(mine.count() / row);
    comm.all_reduce(slowest, comm::ReduceOp::Max).wait();
    return slowest.item<double>();
  };
  check();
  double warm = 0;
  for (int i = 0; i < 3; ++i) warm = sample();
  // A whole round also has a barrier and a small reduction.
  const int repeats =
      std::clamp(int(bench.seconds_per_size * 1e6 / (warm * row + 10)), kMinRepeats, kMaxRepeats);
  for (int i = 0; i < repeats; ++i) samples.push_back(sample());
  check();
  std::ranges::sort(samples);
  auto at_share = [&](double share) { return samples[size_t(share * double(samples.size() - 1))]; };
  BenchLine line{.backend = bench.backend,
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

// All ranks are threads of this process.
BenchLine measure_in_threads(const BenchComm& bench, uint64_t bytes,
                             const std::function<Subject(const Communicator&)>& make) {
  BenchLine line;
  comm::RunOptions options{.threads_per_rank = 1, .pin = true};
  if (bench.backend == "nccl") {
    options.backend = comm::nccl_backend({.file = bench.nccl});
    const int gpus = std::max(1, int(torch::cuda::device_count()));
    for (int rank = 0; rank < bench.ranks; ++rank)  // a GPU for each; else all share the first
      options.devices.push_back({topo::DeviceKind::Cuda, gpus < bench.ranks ? 0 : rank});
  }
  comm::run_ranks(
      bench.ranks,
      [&](const Communicator& comm) {
        const auto mine = measure(comm, bench, bytes, make(comm));
        if (comm.rank() == 0) line = mine;
      },
      options);
  return line;
}

// Another program than this one: yoke-mpi, which is linked with MPI.
void run_under_mpirun(int ranks, const std::string& argument) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "yoke-mpi";
  if (!std::filesystem::exists(program))
    fail(Kind::Usage, "--backend mpi needs ", program.string(),
         ", which is built where MPI is installed (./dev setup installs it)");
  const auto result = run_process(
      {"mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-n", cat(ranks),
       program.string()},
      {.timeout = std::chrono::minutes(10),
       .environment = {"YOKE_FUNCTION=bench", "YOKE_ARGUMENT=" + argument, "OMP_NUM_THREADS=1"}});
  if (result.exit_code != 0)
    fail(Kind::Comm, "mpirun ended with exit code ", result.exit_code, ": ", result.err);
}

std::string encode(const BenchComm& bench, uint64_t bytes, const std::string& file) {
  return join({bench.backend, bench.op, cat(bench.ranks), bench.plain ? "plain" : "allocated",
               cat(bytes), cat(bench.seconds_per_size), file},
              " ");
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

void bench_in_process(const topo::LaunchInfo& launch, const std::string& argument) {
  const auto words = split(argument, ' ');
  YOKE_CHECK(words.size() == 7, argument);
  const BenchComm bench{.backend = words[0],
                        .op = words[1],
                        .ranks = std::stoi(words[2]),
                        .plain = words[3] == "plain",
                        .seconds_per_size = std::stod(words[5])};
  const uint64_t bytes = std::stoull(words[4]);
  comm::JoinOptions options;
  options.run.backend = bench.backend == "mpi" ? program_mpi_backend() : comm::shm_backend();
  options.run.threads_per_rank = 1;
  options.run.pin = bench.backend == "shm";
  comm::run_world(
      launch,
      [&](const Communicator& comm) {
        const auto line = measure(comm, bench, bytes, subject(comm, bench, bytes));
        if (comm.rank() != 0) return;
        std::ofstream file(words[6]);
        write_json(line, file);
      },
      options);
}

BenchLine bench_backend(const BenchComm& bench, uint64_t bytes) {
  if (bench.backend == "local" || bench.backend == "nccl")
    return measure_in_threads(
        bench, bytes, [&](const Communicator& comm) { return subject(comm, bench, bytes); });
  const Scratch scratch;
  const auto file = scratch.path() / "line";
  const auto argument = encode(bench, bytes, file.string());
  if (bench.backend == "shm")
    comm::run_processes(bench.ranks, "bench", {.argument = argument});
  else
    run_under_mpirun(bench.ranks, argument);
  std::ifstream in(file);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto lines = read_json(text);
  YOKE_CHECK(lines.size() == 1, text);
  return lines[0];
}

BenchLine bench_memcpy(const BenchComm& bench, uint64_t bytes) {
  BenchComm copy = bench;
  copy.op = copy.backend = "memcpy";
  return measure_in_threads(copy, bytes, [&](const Communicator& comm) -> Subject {
    const int64_t count = std::max<int64_t>(1, int64_t(bytes) / 4);
    const at::Tensor source = comm.allocate({count}, at::kFloat);
    const at::Tensor target = comm.allocate({count}, at::kFloat);
    source.copy_(pattern(count, comm.rank(), comm.size()));
    return {[=] { target.zero_(); },
            [=] {
              std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
              return comm::Work();
            },
            [=] { return at::equal(source, target); }};
  });
}

}  // namespace yoke::cli
