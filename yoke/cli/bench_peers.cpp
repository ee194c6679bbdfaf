// SPDX-License-Identifier: Apache-2.0
// The peers of `yoke bench comm` are programs of their own (bench/peers); they print what we print.
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/cli/scratch.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;

std::string checked(const std::string& peer, const ProcessResult& result) {
  if (result.timed_out) fail(Kind::Timeout, "the peer ", peer, " did not finish in time");
  if (result.exit_code == 0) return result.out;
  const auto lines = split(result.err, '\n');
  std::string last;
  for (const auto& line : lines)
    if (!line.empty()) last = line;
  fail(Kind::Usage, "the peer ", peer, " failed (exit ", result.exit_code, "): ", last,
       "; run without --peers ", peer);
}

void build(const std::string& peer, const std::vector<std::string>& command,
           const std::string& cure) {
  try {
    checked(peer, run_process(command));
  } catch (const Error& error) {
    fail(Kind::Usage, error.what(), "; ", cure, ", or run without --peers ", peer);
  }
}

// The value of a key in a flat JSON object that one of our own scripts wrote.
std::string field(const std::string& object, const std::string& key) {
  const std::string mark = "\"" + key + "\":";
  size_t begin = object.find(mark);
  if (begin == std::string::npos) fail(Kind::Internal, "a peer's line has no ", key, ": ", object);
  begin = object.find_first_not_of(" \"", begin + mark.size());
  return object.substr(begin, object.find_first_of(",}\"", begin) - begin);
}

}  // namespace

// In the source tree the peers lie beside build/, in an installation below share/.
std::filesystem::path peers_folder() {
  const fs::path program = fs::read_symlink("/proc/self/exe").parent_path();
  for (const fs::path& folder : {program / "../bench/peers", program / "../share/yoke/peers",
                                 program / "../../share/yoke/peers"})
    if (fs::exists(folder / "gloo.py")) return fs::canonical(folder);
  fail(Kind::Usage, "the peers' scripts (bench/peers) were not found beside ", program.string(),
       "; run without --peers");
}

// The python3 that has torch: the one that our LibTorch is a package of, else the one on the path.
std::string python_with_torch() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &info) != 0) {
    const fs::path folder =
        fs::path(info.dli_fname).parent_path();  // PREFIX/lib/pythonX/site-packages/torch/lib
    const fs::path candidate = folder / "../../../../../bin/python3";
    if (fs::exists(candidate)) return candidate.lexically_normal().string();
  }
  return "python3";
}

std::vector<BenchLine> bench_peer(const std::string& peer, const BenchComm& bench) {
  if (peer == "local") {  // our own, to compare another backend with
    BenchComm local = bench;
    local.backend = peer;
    std::vector<BenchLine> lines;
    for (const auto bytes : bench.sizes) lines.push_back(bench_backend(local, bytes));
    return lines;
  }
  const fs::path folder = peers_folder();
  std::vector<std::string> sizes;
  for (const auto size : bench.sizes) sizes.push_back(std::to_string(size));
  const std::vector<std::string> arguments{"--op",
                                           bench.op,
                                           "--ranks",
                                           std::to_string(bench.ranks),
                                           "--sizes",
                                           join(sizes, ","),
                                           "--seconds-per-size",
                                           cat(bench.seconds_per_size)};
  const ProcessOptions options{
      .timeout = std::chrono::seconds(120) +
                 std::chrono::seconds(int(10 * bench.seconds_per_size)) * int(sizes.size()),
      .environment = {"OMP_NUM_THREADS=1"}};
  std::vector<std::string> command;
  const Scratch scratch;
  if (peer == "gloo") {
    command = {python_with_torch(), (folder / "gloo.py").string()};
  } else if (peer == "nccl") {
    const std::string program = (scratch.path() / "nccl").string();
    build(peer,
          {"nvcc", "-O2", "-std=c++20", "-o", program, (folder / "nccl.cpp").string(), "-ldl"},
          "install the CUDA toolkit");
    command = {program, "--nccl", bench.nccl.empty() ? "libnccl.so.2" : bench.nccl};
  } else {
    const std::string program = (scratch.path() / "openmpi").string();
    build(peer,
          {"mpicc", "-O3", "-march=native", "-o", program, (folder / "openmpi.c").string(), "-lm"},
          "install Open MPI with its compiler (./dev setup does)");
    command = {
        "mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-n", std::to_string(bench.ranks),
        program};
  }
  command.insert(command.end(), arguments.begin(), arguments.end());

  auto lines = read_json(checked(peer, run_process(command, options)));
  for (auto& line : lines) line.backend = peer;
  return lines;
}

void write_json(const BenchLine& line, std::ostream& out) {
  observe::JsonLines(out).write({{"backend", line.backend},
                                 {"op", line.op},
                                 {"ranks", line.ranks},
                                 {"bytes", line.bytes},
                                 {"median_us", line.median_us},
                                 {"p10_us", line.p10_us},
                                 {"p90_us", line.p90_us},
                                 {"alg_gbps", line.alg_gbps},
                                 {"bus_gbps", line.bus_gbps},
                                 {"repeats", line.repeats},
                                 {"verified", line.verified}});
}

std::vector<BenchLine> read_json(const std::string& text) {
  std::vector<BenchLine> lines;
  for (const auto& object : split(text, '\n')) {
    if (!object.starts_with("{")) continue;
    auto number = [&](const std::string& key) { return std::stod(field(object, key)); };
    lines.push_back({.backend = field(object, "backend"),
                     .op = field(object, "op"),
                     .ranks = int(number("ranks")),
                     .bytes = uint64_t(number("bytes")),
                     .median_us = number("median_us"),
                     .p10_us = number("p10_us"),
                     .p90_us = number("p90_us"),
                     .alg_gbps = number("alg_gbps"),
                     .bus_gbps = number("bus_gbps"),
                     .repeats = int(number("repeats")),
                     .verified = field(object, "verified") == "true"});
  }
  return lines;
}

}  // namespace yoke::cli
