// SPDX-License-Identifier: Apache-2.0
// The command line of `yoke bench`.
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>

#include "yoke/base/clock.h"
#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/cli/bench_data.h"
#include "yoke/cli/bench_files.h"
#include "yoke/cli/bench_mesh.h"
#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_train.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/environment.h"
#include "yoke/observe/json_lines.h"
#include "yoke/observe/progress.h"

namespace yoke::cli {
namespace {

struct Options {
  std::string backend = "local", ops = "all_reduce", sizes = "64,1M,4M,64M", peers, memory = "own",
              nccl;
  int ranks = 2;
  double seconds = 1.0;
  bool json = false;
};

std::vector<uint64_t> parse_sizes(const std::string& text) {
  std::vector<uint64_t> sizes;
  for (const auto& word : split(text, ',')) {
    const auto size = parse_bytes(word);
    if (!size || *size < 4 || *size > uint64_t{8} << 30)
      fail(Kind::Usage, "--sizes: '", word, "' is not a size from 4 to 8G; write 64,1M,4M,64M");
    sizes.push_back(*size);
  }
  return sizes;
}

// A row of a Markdown table; "we are" so many times as fast as that line.
void write_row(const BenchLine& line, const BenchLine& ours) {
  std::string ratio = "";
  const bool comparable =
      line.backend != "memcpy" || line.bytes >= 64 << 10;  // else it is no time at all
  if (comparable && &ours != &line) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2fx", line.median_us / ours.median_us);
    ratio = text;
  }
  std::printf("| %-14s | %-8s | %9s | %12.2f | %10.2f | %10.2f | %9.2f | %9.2f | %10s | %-8s |\n",
              line.op.c_str(), line.backend.c_str(), bytes_text(line.bytes).c_str(), line.median_us,
              line.p10_us, line.p90_us, line.alg_gbps, line.bus_gbps, ratio.c_str(),
              line.verified ? "yes" : "NO");
}

void bench_comm(const Options& options) {
  const auto ops = words("--op", options.ops, bench_ops());
  const auto peers = options.peers.empty()
                         ? std::vector<std::string>{}
                         : words("--peers", options.peers, {"gloo", "openmpi", "local", "nccl"});
  words("--backend", options.backend, {"local", "shm", "mpi", "nccl"});
  words("--memory", options.memory, {"own", "plain"});
  if (options.ranks < 1 || options.ranks > 64)
    fail(Kind::Usage, "--ranks wants 1 to 64, got ", options.ranks);
  if (!(options.seconds > 0 && options.seconds <= 60))
    fail(Kind::Usage, "--seconds wants more than 0 and at most 60, got ", options.seconds);
  BenchComm bench{.backend = options.backend,
                  .ranks = options.ranks,
                  .plain = options.memory == "plain",
                  .nccl = options.nccl,
                  .sizes = parse_sizes(options.sizes),
                  .seconds_per_size = options.seconds};

  const SteadyClock clock;
  const uint64_t rounds = ops.size() * (2 * bench.sizes.size() + peers.size());
  observe::Progress progress(
      std::cerr, clock,
      {.label = "bench", .total = rounds, .unit = "runs", .is_terminal = ::isatty(2) == 1});
  uint64_t done = 0;
  if (!options.json)
    std::printf("| %-14s | %-8s | %9s | %12s | %10s | %10s | %9s | %9s | %10s | %s |\n|%s|\n", "op",
                "backend", "bytes", "median us", "p10 us", "p90 us", "alg GB/s", "bus GB/s",
                "we are", "verified",
                "----------------|----------|----------:|-------------:|-----------:|-----------:|-"
                "---------:|----------:|-----------:|----------");
  bool all_verified = true;
  for (const auto& op : ops) {
    bench.op = op;
    std::map<uint64_t, std::vector<BenchLine>> table;  // by size; ours first
    for (const auto bytes : bench.sizes) {
      table[bytes].push_back(bench_backend(bench, bytes));
      progress.update(++done, cat(op, " ", bytes_text(bytes)));
      table[bytes].push_back(bench_memcpy(bench, table[bytes].front().bytes));
      progress.update(++done, cat("memcpy ", bytes_text(bytes)));
    }
    for (const auto& peer : peers) {
      const auto lines = bench_peer(peer, bench);
      if (lines.size() != bench.sizes.size())
        fail(Kind::Internal, "the peer ", peer, " measured ", lines.size(), " of ",
             bench.sizes.size(), " sizes");
      for (size_t i = 0; i < lines.size(); ++i) table[bench.sizes[i]].push_back(lines[i]);
      progress.update(++done, peer);
    }
    for (const auto& [bytes, lines] : table) {
      for (const auto& line : lines) {
        if (options.json)
          write_json(line, std::cout);
        else
          write_row(line, lines.front());
        all_verified = all_verified && line.verified;
      }
    }
    std::fflush(stdout);
  }
  if (!all_verified)
    fail(Kind::Internal, "a result was wrong (see the lines that are not verified)");
}

struct DataOptions {
  std::string model = "gpt", zero = "0,1,2,3", peers, device = "cpu", nccl, trace;
  int ranks = 2, rounds = 7, steps = 0;
  bool json = false;
};

void bench_data(const DataOptions& options) {
  std::vector<std::string> names{"alone", "one"};
  const std::vector<std::string> known_peers{"torch", "compile", "ddp", "fsdp2"};
  const bool on_gpu = options.device != "cpu";
  if (on_gpu) names.emplace_back("bf16");
  for (const auto& stage : words("--zero", options.zero, {"0", "1", "2", "3"}))
    names.push_back("zero" + stage);
  if (!options.peers.empty())
    for (const auto& peer : words("--peers", options.peers, known_peers)) names.push_back(peer);
  if (on_gpu && (std::ranges::count(names, "ddp") || std::ranges::count(names, "fsdp2")))
    fail(Kind::Usage,
         "on one GPU there is no DDP and no FSDP2 to compare with, whose NCCL refuses "
         "ranks that share one; take torch and compile");
  if (options.ranks < 1 || options.ranks > 64 || options.rounds < 1 || options.steps < 0)
    fail(Kind::Usage, "--ranks wants 1 to 64, --rounds 1 or more, --steps 0 or more; got ",
         options.ranks, ", ", options.rounds, " and ", options.steps);
  for (const auto& model : words("--model", options.model, {"gpt", "mlp", "gpt2"})) {
    const BenchData bench{
        .model = model, .ranks = options.ranks, .device = options.device, .nccl = options.nccl};
    const StepLoad load = load_of(model);
    const double peak = peak_flops(read_visible_host(read_environment()),
                                   topo::parse_devices(options.device).at(0), model == "gpt2");
    const Turns turns(
        names, [&](const auto& name) { return make_trainer(name, bench); }, options.rounds,
        options.steps, model);
    if (!options.json)
      std::printf(
          "| %-5s | %-7s | %5s | %10s | %15s | %12s | %5s | %s |\n|%s|\n", "model", "what", "ranks",
          "ms a step", "of alone's time", "tokens/s", "MFU", "times as fast, by peer",
          "-------|---------|------:|-----------:|----------------:|-------------:|------:|---");
    for (size_t i = 0; i < names.size(); ++i) {
      const bool ours = std::ranges::find(known_peers, names[i]) == known_peers.end();
      const bool parallel =
          names[i].starts_with("zero") || names[i] == "ddp" || names[i] == "fsdp2";
      const int ranks = parallel ? options.ranks : 1;
      const double tokens = load.tokens * ranks / turns.ms(i) * 1e3;  // a second
      const double mfu = peak > 0 ? load.flops / load.tokens * tokens / peak : 0;
      std::vector<std::string> against;
      for (size_t other = 0; ours && other < names.size(); ++other)
        if (std::ranges::find(known_peers, names[other]) != known_peers.end()) {
          char text[64];
          std::snprintf(text, sizeof text, "%s %.2f", names[other].c_str(), turns.ratio(i, other));
          against.emplace_back(text);
        }
      if (options.json)
        observe::JsonLines(std::cout).write({{"model", model},
                                             {"what", names[i]},
                                             {"ranks", ranks},
                                             {"ms_per_step", turns.ms(i)},
                                             {"of_alone", 1 / turns.ratio(i, 0)},
                                             {"tokens_per_s", tokens},
                                             {"mfu", mfu},
                                             {"against", join(against, ", ")}});
      else
        std::printf("| %-5s | %-7s | %5d | %10.2f | %15.3f | %12.0f | %5s | %s |\n", model.c_str(),
                    names[i].c_str(), ranks, turns.ms(i), 1 / turns.ratio(i, 0), tokens,
                    mfu > 0 ? cat(int(100 * mfu + 0.5), " %").c_str() : "",
                    join(against, ", ").c_str());
    }
    for (size_t i = 0; i < names.size() && !options.trace.empty(); ++i) {
      if (std::ranges::find(known_peers, names[i]) != known_peers.end()) continue;
      const std::string file = cat(options.trace, ".", model, ".", names[i], ".json");
      const auto overlap = trace_overlap(turns.trainer(i), 5, file);
      std::printf("%s %s: traced to %s", model.c_str(), names[i].c_str(), file.c_str());
      if (overlap.communicated_ms > 0)
        std::printf("; NCCL runs %.2f ms a step, %.2f ms of it (%.0f %%) beside computation",
                    overlap.communicated_ms, overlap.hidden_ms,
                    100 * overlap.hidden_ms / overlap.communicated_ms);
      std::printf("\n");
    }
    std::fflush(stdout);
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* verb = app.add_subcommand("bench", "Measure, next to peers where they are installed");
  verb->require_subcommand(1);
  auto* comm = verb->add_subcommand("comm", "Collectives: latency, algorithm and bus bandwidth");
  auto options = std::make_shared<Options>();
  comm->add_option("--backend", options->backend,
                   "local: threads of this process; shm, mpi: processes; nccl: threads with GPUs")
      ->capture_default_str();
  comm->add_option("--memory", options->memory,
                   "own: tensors from the backend's allocate(); plain: ordinary tensors")
      ->capture_default_str();
  comm->add_option("--nccl", options->nccl, "The file of the NCCL to use; else LibTorch's");
  comm->add_option("--op", options->ops,
                   "One or several, with commas, of " + join(bench_ops(), ", "))
      ->capture_default_str();
  comm->add_option("--ranks", options->ranks, "How many ranks take part, 1 to 64")
      ->capture_default_str();
  comm->add_option(
          "--sizes", options->sizes,
          "Bytes from 4 to 8G, as nccl-tests counts them; rounded to whole floats and pieces")
      ->capture_default_str();
  comm->add_option("--peers", options->peers,
                   "With commas, of gloo, openmpi, local, nccl: measured in the same run");
  comm->add_option("--seconds", options->seconds, "How long to measure each size")
      ->capture_default_str();
  comm->add_flag("--json", options->json, "One JSON object per line");
  comm->callback([options] { bench_comm(*options); });

  auto* data = verb->add_subcommand("data", "Training steps under data parallelism, by ZeRO stage");
  auto chosen = std::make_shared<DataOptions>();
  data->add_option("--model", chosen->model,
                   "With commas, of gpt (3.5 M parameters, 1,024 tokens a rank), mlp (16 layers of "
                   "1024 x 1024, batch 4), gpt2 (124 M in bfloat16, 16,384 tokens a rank)")
      ->capture_default_str();
  data->add_option("--zero", chosen->zero, "ZeRO stages, with commas")->capture_default_str();
  data->add_option("--ranks", chosen->ranks, "Ranks, each a thread with one core")
      ->capture_default_str();
  data->add_option("--peers", chosen->peers,
                   "With commas, of torch (one process), compile (the same, compiled), ddp, fsdp2: "
                   "PyTorch, over gloo");
  data->add_option("--device", chosen->device, "Of all ranks: cpu, or a GPU such as cuda:0")
      ->capture_default_str();
  data->add_option("--nccl", chosen->nccl,
                   "Ranks meet over this file of NCCL, or over LibTorch's (auto); else over local");
  data->add_option(
          "--trace", chosen->trace,
          "Writes traces to FILE.….json; over NCCL tells how much communication was hidden")
      ->type_name("FILE");
  data->add_option("--rounds", chosen->rounds, "How often all of them take turns")
      ->capture_default_str();
  data->add_option("--steps", chosen->steps, "Steps of a round; 0: about a second")
      ->capture_default_str();
  data->add_flag("--json", chosen->json, "One JSON object per line");
  data->callback([chosen] { bench_data(*chosen); });
  add_bench_mesh(*verb);
  add_bench_train(*verb);
  add_bench_serve(*verb);
  add_bench_files(*verb);
}

}  // namespace yoke::cli
