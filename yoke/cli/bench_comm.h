// SPDX-License-Identifier: Apache-2.0
// `yoke bench comm`: how fast the collectives of a backend are, next to memcpy and, in the same
// run, to what else the machine has. A sample is one call after a barrier and lasts as long as its
// slowest rank; results are verified. Algorithm and bus bandwidth are those of nccl-tests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "yoke/topo/launch.h"

namespace CLI {
class App;
}

namespace yoke::cli {

void add_bench(CLI::App& app);

struct BenchComm {
  std::string backend = "local";
  std::string op = "all_reduce";
  int ranks = 2;
  bool plain = false;                // ordinary tensors, not those from allocate()
  std::string nccl = {};             // the library's file
  std::vector<uint64_t> sizes = {};  // bytes: of the buffer, or of all ranks' pieces together
  double seconds_per_size = 1.0;
};

struct BenchLine {
  std::string backend, op;
  int ranks = 0;
  uint64_t bytes = 0;
  double median_us = 0, p10_us = 0, p90_us = 0;
  double alg_gbps = 0, bus_gbps = 0;
  int repeats = 0;
  bool verified = false;
};

const std::vector<std::string>& bench_ops();
// What bus bandwidth is of algorithm bandwidth.
double bus_factor(const std::string& op, int ranks);

// In threads of this process (local, nccl), in processes (shm), or under mpirun (mpi).
BenchLine bench_backend(const BenchComm& bench, uint64_t bytes);
// What such a process runs: a comm::ProcessFunction.
void bench_in_process(const topo::LaunchInfo& launch, const std::string& argument);
// Every rank copies `bytes` from one buffer of its own to another, all at the same time.
BenchLine bench_memcpy(const BenchComm& bench, uint64_t bytes);
// gloo, openmpi or nccl, by the programs in bench/peers.
std::vector<BenchLine> bench_peer(const std::string& peer, const BenchComm& bench);

// Where the peers' programs lie, and the python3 that has torch.
std::filesystem::path peers_folder();
std::string python_with_torch();

// A line as JSON, and back.
void write_json(const BenchLine& line, std::ostream& out);
std::vector<BenchLine> read_json(const std::string& lines);

}  // namespace yoke::cli
