// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_files.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/rng.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/safetensors.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/scratch.h"
#include "yoke/data/dataset.h"
#include "yoke/data/sampler.h"
#include "yoke/models/generate.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string what = "generate,tokenize,tokens,load", text = "yoke,docs,tests", peers;
  int rounds = 5, threads = 2, tokens = 32;
};

double now() {
  return std::chrono::duration<double>(SteadyClock().now().time_since_epoch()).count();
}

class Ours final : public Trainer {
 public:
  explicit Ours(std::function<void(int)> run) : run_(std::move(run)) {}
  double round(int count) override {
    const double begin = now();
    run_(count);
    return now() - begin;
  }

 private:
  const std::function<void(int)> run_;
};

// We, and where it is asked for the peer, in turns.
Turns take_turns(const Options& options, const std::string& peer,
                 const std::vector<std::string>& arguments, const std::function<void(int)>& run,
                 int steps) {
  std::vector<std::string> names{"yoke"};
  if (!options.peers.empty()) names.push_back(peer);
  return Turns(
      names,
      [&](const std::string& name) -> std::unique_ptr<Trainer> {
        if (name == peer) return make_peer("files.py", arguments);
        return std::make_unique<Ours>(run);
      },
      options.rounds, steps, "files");
}

std::string read_file(const fs::path& path) { return data::read_text(path.string()); }

void bench_generate(const Options& options, const fs::path& scratch) {
  const fs::path folder = scratch / "gpt2";
  {
    const models::GptOptions gpt2;
    std::map<std::string, at::Tensor> weights;
    const auto all = models::make_gpt(gpt2).layers({});
    for (size_t place = 0; place < all.size(); ++place)
      for (const auto& item : all[place]().module->named_parameters())
        weights[cat(place, ".", item.key())] = item.value().detach();
    models::write_hugging_face(folder, gpt2,
                               [&](const std::string& name) { return weights.at(name); });
  }
  at::set_num_threads(options.threads);
  const models::Whole model(models::open_model(folder).architecture, at::kCPU);
  std::vector<int64_t> prompt, tokens;
  for (int64_t i = 1; i <= 16; ++i) prompt.push_back(i);
  const bool has_peer = !options.peers.empty();
  const auto turns = take_turns(
      options, "transformers",
      {"--peer", "generate", "--model", folder.string(), "--out", (scratch / "tokens").string(),
       "--threads", cat(options.threads)},
      [&](int count) {
        tokens = models::generate(model, prompt, {.tokens = count, .sampling = {.temperature = 0}});
      },
      options.tokens);
  const std::string about = cat("generate, GPT-2 124 M, ", options.threads, " threads: ");
  std::printf("%syoke %.2f ms a token\n", about.c_str(), turns.ms(0));
  if (has_peer)
    std::printf("%stransformers %.2f ms a token, yoke is %.2f times as fast\n", about.c_str(),
                turns.ms(1), turns.ratio(0, 1));
  if (!has_peer) return;
  std::vector<std::string> ours;
  for (const int64_t token : tokens) ours.push_back(cat(token));
  std::printf("generate: greedy tokens are %s\n",
              join(ours, " ") == read_file(scratch / "tokens") ? "the same" : "NOT the same");
}

void bench_tokenize(const Options& options, const fs::path& scratch) {
  std::string text;
  for (const auto& file : data::text_files(options.text)) {
    const std::string one = data::read_text(file);
    if (data::is_text(one)) text += one;
  }
  const fs::path file = scratch / "text", tokenizer_file = scratch / "tokenizer.json";
  std::ofstream(file, std::ios::binary) << text;
  const auto trained = run_process({python_with_torch(), (peers_folder() / "files.py").string(),
                                    "--train", tokenizer_file.string(), "--text", file.string()});
  if (trained.exit_code != 0)
    fail(Kind::Usage, "the tokenizer to measure is trained by Python's tokenizers: ",
         trained.err.substr(trained.err.rfind('\n', trained.err.size() - 2) + 1));
  const auto tokenizer = data::open_tokenizer(tokenizer_file);
  const bool has_peer = !options.peers.empty();
  size_t total = 0;
  const auto turns = take_turns(
      options, "tokenizers",
      {"--peer", "tokenize", "--tokenizer", tokenizer_file.string(), "--text", file.string(),
       "--out", (scratch / "count").string()},
      [&](int count) {
        for (int i = 0; i < count; ++i) {
          total = 0;
          for (size_t at = 0; at < text.size(); at += 100000)
            total += tokenizer->encode(std::string_view(text).substr(at, 100000)).size();
        }
      },
      1);
  const double kilobytes = double(text.size()) / 1e3;
  std::printf("tokenize, 40,000 words, 1 thread: yoke %.2f MB/s\n", kilobytes / turns.ms(0));
  if (has_peer)
    std::printf(
        "tokenize, 40,000 words, 1 thread: tokenizers %.2f MB/s, yoke is %.2f times as fast\n",
        kilobytes / turns.ms(1), turns.ratio(0, 1));
  std::printf("tokenize: %zu tokens%s\n", total,
              has_peer ? cat(", of the peer ", read_file(scratch / "count")).c_str() : "");
}

void bench_tokens(const Options& options, const fs::path& scratch) {
  const fs::path file = scratch / "tokens.bin";
  constexpr int64_t kTokens = 50'000'000, kSeq = 1024, kBatch = 8;
  {
    const Rng rng(1, "tokens");
    std::vector<uint16_t> tokens(static_cast<size_t>(kTokens));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = uint16_t(rng.below(i, 50257));
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(tokens.data()), std::streamsize(2 * tokens.size()));
  }
  at::set_num_threads(1);
  const auto dataset = data::open_tokens(file.string(), kSeq, 50257);
  const data::Sampler sampler(dataset->size(), true, 1);
  std::vector<double> speeds;
  for (int round = 0; round < options.rounds; ++round) {
    const double begin = now();
    int64_t count = 0;
    for (int64_t at = 0; at + kBatch <= dataset->size() / 4; at += kBatch, count += kBatch) {
      std::vector<int64_t> samples;
      for (int64_t i = 0; i < kBatch; ++i) samples.push_back(sampler.at(at + i));
      dataset->batch(samples);
    }
    speeds.push_back(double(count * kSeq) / (now() - begin));
  }
  std::ranges::sort(speeds);
  std::printf("tokens, a .bin of uint16, shuffled, 1 thread: %.1f M tokens/s\n",
              speeds[speeds.size() / 2] / 1e6);
}

// So that it is read from the disk again.
void evict(const fs::path& file) {
  const int fd = ::open(file.c_str(), O_RDONLY);
  if (fd < 0) return;
  ::fsync(fd);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}

void bench_load(const Options& options, const fs::path& scratch) {
  const fs::path file = scratch / "model.safetensors";
  {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (int i = 0; i < 64; ++i) tensors.emplace_back(cat("t", i), at::rand({4 << 20}));
    checkpoint::write_safetensors(file, tensors, {});
  }
  const auto bytes = double(fs::file_size(file));
  std::vector<double> cat_times, ours, ratios;
  for (int round = 0; round < options.rounds; ++round) {
    evict(file);
    double begin = now();
    run_process({"sh", "-c", "cat '" + file.string() + "' > /dev/null"});
    cat_times.push_back(now() - begin);
    evict(file);
    begin = now();
    const checkpoint::SafetensorsFile opened(file);
    double sum = 0;  // a number of every page
    for (const auto& name : opened.names()) {
      const at::Tensor tensor = opened.tensor(name);
      const float* values = tensor.const_data_ptr<float>();
      for (int64_t i = 0; i < tensor.numel(); i += 1024) sum += double(values[i]);
    }
    ours.push_back(now() - begin);
    ratios.push_back(cat_times.back() / ours.back());
    YOKE_CHECK(sum > 0);
  }
  for (auto* list : {&cat_times, &ours, &ratios}) std::ranges::sort(*list);
  const size_t middle = ratios.size() / 2;
  std::printf("load, %.2f GB of safetensors, cold: cat %.2f GB/s, yoke %.2f GB/s, %.2f of cat\n",
              bytes / 1e9, bytes / 1e9 / cat_times[middle], bytes / 1e9 / ours[middle],
              ratios[middle]);
}

void bench(const Options& options) {
  if (options.rounds < 1 || options.threads < 1 || options.tokens < 1)
    fail(Kind::Usage, "--rounds, --threads and --tokens want 1 or more");
  const Scratch scratch;
  for (const auto& what :
       words("--what", options.what, {"generate", "tokenize", "tokens", "load"})) {
    if (what == "generate") bench_generate(options, scratch.path());
    if (what == "tokenize") bench_tokenize(options, scratch.path());
    if (what == "tokens") bench_tokens(options, scratch.path());
    if (what == "load") bench_load(options, scratch.path());
  }
}

}  // namespace

void add_bench_files(CLI::App& bench_verb) {
  auto* verb =
      bench_verb.add_subcommand("files", "Reading and using the models and data of others");
  auto options = std::make_shared<Options>();
  verb->add_option("--what", options->what, "With commas, of generate, tokenize, tokens, load")
      ->capture_default_str();
  verb->add_option("--text", options->text, "What is tokenized: files or folders, with commas")
      ->capture_default_str();
  verb->add_option(
          "--peers", options->peers,
          "python: transformers and tokenizers in the same run, of the Python that has torch")
      ->check(CLI::IsMember({"python"}));
  verb->add_option("--rounds", options->rounds, "How often all of them take turns")
      ->capture_default_str();
  verb->add_option("--threads", options->threads, "Of generate, ours and theirs")
      ->capture_default_str();
  verb->add_option("--tokens", options->tokens, "Of a round of generate")->capture_default_str();
  verb->callback([options] { bench(*options); });
}

}  // namespace yoke::cli
