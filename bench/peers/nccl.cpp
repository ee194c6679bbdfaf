// SPDX-License-Identifier: Apache-2.0
// Measures NCCL by itself the way nccl-tests does: a thread for each rank, buffers made once, calls
// in a row on the rank's stream, and the time until the last of them is over, divided by their
// number. Build and run:
//   nvcc -O2 -std=c++17 -o peer nccl.cpp -ldl
//   ./peer --nccl libnccl.so.2 --op all_reduce --ranks 2 --sizes 64,1048576
// With fewer GPUs than ranks all share the first, which needs NCCL 2.30,
// NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL_MAX_NCHANNELS=2. Sizes are bytes of float32 as nccl-tests
// counts them. Results of all_reduce are verified. One JSON object for each size; an alarm ends the
// process if NCCL hangs.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kRow = 20, kMinRepeats = 7, kMaxRepeats = 1000;
enum { kFloat = 7, kSum = 0 };
struct Id {
  char bytes[128];
};
using Comm = void*;

void* library = nullptr;
template <typename F>
F* find(const char* name) {
  auto* found = reinterpret_cast<F*>(dlsym(library, name));
  if (!found) std::fprintf(stderr, "nccl: no %s\n", name), std::exit(2);
  return found;
}
void check(int result, const char* what) {
  if (result != 0) std::fprintf(stderr, "nccl: %s gave %d\n", what, result), std::exit(1);
}
void check(cudaError_t result, const char* what) { check(int(result), what); }

struct Options {
  std::string nccl = "libnccl.so.2", op = "all_reduce", sizes = "64,1048576";
  int ranks = 2;
  double seconds = 1.0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--nccl") options.nccl = value;
    if (name == "--op") options.op = value;
    if (name == "--sizes") options.sizes = value;
    if (name == "--ranks") options.ranks = std::atoi(value.c_str());
    if (name == "--seconds-per-size") options.seconds = std::atof(value.c_str());
  }
  library = dlopen(options.nccl.c_str(), RTLD_NOW);
  if (!library) std::fprintf(stderr, "nccl: %s\n", dlerror()), std::exit(2);
  using Reduce = int(const void*, void*, size_t, int, int, Comm, cudaStream_t);
  using Rooted = int(const void*, void*, size_t, int, int, int, Comm, cudaStream_t);
  using Move = int(const void*, void*, size_t, int, Comm, cudaStream_t);
  using Cast = int(const void*, void*, size_t, int, int, Comm, cudaStream_t);
  auto* get_id = find<int(Id*)>("ncclGetUniqueId");
  auto* init = find<int(Comm*, int, Id, int)>("ncclCommInitRank");
  auto* destroy = find<int(Comm)>("ncclCommDestroy");
  auto* all_reduce = find<Reduce>("ncclAllReduce");
  auto* reduce_scatter = find<Reduce>("ncclReduceScatter");
  auto* reduce = find<Rooted>("ncclReduce");
  auto* all_gather = find<Move>("ncclAllGather");
  auto* broadcast = find<Cast>("ncclBroadcast");
  auto* send = find<int(const void*, size_t, int, int, Comm, cudaStream_t)>("ncclSend");
  auto* recv = find<int(void*, size_t, int, int, Comm, cudaStream_t)>("ncclRecv");
  auto* start = find<int()>("ncclGroupStart");
  auto* end = find<int()>("ncclGroupEnd");

  std::vector<size_t> sizes;
  for (size_t at = 0; at < options.sizes.size();) {
    size_t used = 0;
    sizes.push_back(std::stoull(options.sizes.substr(at), &used));
    at += used + 1;
  }
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  Id id;
  check(get_id(&id), "ncclGetUniqueId");
  const int n = options.ranks;
  std::barrier barrier(n);
  std::vector<double> times(static_cast<size_t>(n));
  auto rank_main = [&](int rank) {
    check(cudaSetDevice(gpus < n ? 0 : rank), "cudaSetDevice");
    Comm comm = nullptr;
    check(init(&comm, n, id, rank), "ncclCommInitRank");
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    float *a = nullptr, *b = nullptr;
    const size_t largest = *std::max_element(sizes.begin(), sizes.end()) + 4096;
    check(cudaMalloc(&a, largest), "cudaMalloc");
    check(cudaMalloc(&b, largest), "cudaMalloc");
    for (const size_t bytes : sizes) {
      ::alarm(120);
      const size_t piece = std::max<size_t>(1, bytes / 4 / size_t(n));
      const size_t count = std::max<size_t>(1, bytes / 4);
      const std::string& op = options.op;
      auto call = [&] {
        if (op == "all_reduce")
          return check(all_reduce(a, a, count, kFloat, kSum, comm, stream), "");
        if (op == "broadcast") return check(broadcast(a, a, count, kFloat, 0, comm, stream), "");
        if (op == "reduce") return check(reduce(a, a, count, kFloat, kSum, 0, comm, stream), "");
        if (op == "all_gather")
          return check(all_gather(a + size_t(rank) * piece, a, piece, kFloat, comm, stream), "");
        if (op == "reduce_scatter")
          return check(reduce_scatter(a, b, piece, kFloat, kSum, comm, stream), "");
        check(start(), "ncclGroupStart");
        for (int r = 0; r < n; ++r) {
          check(send(a + size_t(r) * piece, piece, kFloat, r, comm, stream), "ncclSend");
          check(recv(b + size_t(r) * piece, piece, kFloat, r, comm, stream), "ncclRecv");
        }
        check(end(), "ncclGroupEnd");
      };
      bool verified = true;
      if (op == "all_reduce") {
        const std::vector<float> mine(count, float(rank + 1));
        check(cudaMemcpy(a, mine.data(), count * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
        barrier.arrive_and_wait();
        call();
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        std::vector<float> got(count);
        check(cudaMemcpy(got.data(), a, count * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
        verified = std::all_of(got.begin(), got.end(),
                               [&](float x) { return x == float(n * (n + 1) / 2); });
      }
      check(cudaMemset(a, 0, largest), "cudaMemset");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      auto sample = [&] {
        barrier.arrive_and_wait();
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < kRow; ++i) call();
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        times[size_t(rank)] =
            std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
                .count() /
            kRow;
        barrier.arrive_and_wait();
        const double slowest = *std::max_element(times.begin(), times.end());
        barrier.arrive_and_wait();
        return slowest;
      };
      double warm = 0;
      for (int i = 0; i < 3; ++i) warm = sample();
      const int repeats =
          std::clamp(int(options.seconds * 1e6 / (warm * kRow + 10)), kMinRepeats, kMaxRepeats);
      std::vector<double> samples;
      for (int i = 0; i < repeats; ++i) samples.push_back(sample());
      if (rank != 0) continue;
      std::sort(samples.begin(), samples.end());
      auto share = [&](double s) { return samples[size_t(s * double(samples.size() - 1))]; };
      const bool pieces = op == "all_gather" || op == "reduce_scatter" || op == "all_to_all";
      const double moved = pieces ? double(piece) * 4 * n : double(count) * 4;
      const double factor = op == "all_reduce" ? 2.0 * (n - 1) / n
                            : pieces           ? double(n - 1) / n
                                               : 1.0;
      const double gbps = moved / share(0.5) / 1e3;
      std::printf(
          "{\"backend\": \"nccl\", \"op\": \"%s\", \"ranks\": %d, \"bytes\": %.0f, \"median_us\": "
          "%f, "
          "\"p10_us\": %f, \"p90_us\": %f, \"alg_gbps\": %f, \"bus_gbps\": %f, \"repeats\": %d, "
          "\"verified\": %s}\n",
          op.c_str(), n, moved, share(0.5), share(0.1), share(0.9), gbps, gbps * factor, repeats,
          verified ? "true" : "false");
      std::fflush(stdout);
    }
    barrier.arrive_and_wait();
    cudaFree(a), cudaFree(b), cudaStreamDestroy(stream);
    destroy(comm);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) threads.emplace_back(rank_main, rank);
  for (auto& thread : threads) thread.join();
}
