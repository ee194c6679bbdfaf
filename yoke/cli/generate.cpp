// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/generate.h"

#include <ATen/Functions.h>
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/job_progress.h"
#include "yoke/models/generate.h"
#include "yoke/observe/json_lines.h"
#include "yoke/parallel/passing.h"
#include "yoke/train/resolve.h"
#include "yoke/train/words.h"

namespace yoke::cli {
namespace {

struct Options {
  std::string path = {}, prompt = {}, tokenizer = {}, device = "auto", dtype = "fp32";
  std::vector<std::string> overrides = {};
  models::GenerateOptions generate = {};
  int64_t samples = 0;
  bool json = false;
};

at::Device device_of(const std::string& word) {
  const auto host = read_visible_host(read_environment());
  const auto device = topo::parse_devices(word, &host)[0];
  return device.kind == topo::DeviceKind::Cuda ? at::Device(at::kCUDA, int8_t(device.index))
                                               : at::Device(at::kCPU);
}

at::ScalarType type_of(const std::string& word) {
  return word == "bf16" ? at::kBFloat16 : word == "fp16" ? at::kHalf : at::kFloat;
}

void generate(const Options& options) {
  options.generate.sampling.check();
  const auto opened = models::open_model(options.path);
  const auto words = train::words_of(opened, options.tokenizer);
  std::string prompt = options.prompt;
  if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  const models::Whole model(opened.architecture, device_of(options.device), type_of(options.dtype));
  const auto print = [&](std::string_view text) {
    if (options.json) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  print(prompt);
  std::string text;
  const auto [given, result] =
      train::write_text(model, words, prompt, options.generate, [&](std::string_view more) {
        text += more;
        print(more);
        return std::ferror(stdout) == 0;
      });
  print("\n");
  if (options.json) {
    std::cout
        << observe::JsonObject({{"prompt", prompt}, {"text", text}, {"tokens", result}}).text()
        << "\n";
  }
  if (int64_t(result.size()) < options.generate.tokens && !result.empty() &&
      result.back() != words.end)
    std::cerr << "yoke: after " << given + result.size()
              << " tokens the model knows no more positions\n";
}

void eval(const Options& options) {
  const auto opened = models::open_model(options.path);
  auto config = train::config_of(opened, options.overrides);
  train::settle(config);
  const auto whole = train::open_data(config);
  const int64_t kept = int64_t(double(whole->size()) * config.data.val_fraction);
  const auto dataset = kept > 0 ? data::part_of(whole, whole->size() - kept, whole->size()) : whole;
  const models::Whole model(opened.architecture, device_of(options.device), type_of(options.dtype));
  const int64_t samples =
      options.samples > 0 ? std::min(options.samples, dataset->size()) : dataset->size();
  const int64_t each = config.train.batch > 0 ? config.train.batch : 8;
  JobProgress progress("eval", uint64_t(samples), "samples");
  const bool has_words = models::as_words(opened.architecture).has_value();
  double loss = 0, count = 0, right = 0;
  for (int64_t first = 0; first < samples; first += each) {
    std::vector<int64_t> numbers;
    for (int64_t i = first; i < std::min(samples, first + each); ++i) numbers.push_back(i);
    const auto batch = dataset->batch(numbers);
    const at::Device device = model.model().device;
    const at::Tensor target = batch.target.to(device);
    parallel::Passing passing{.target = target};
    if (batch.documents.defined()) passing.documents = batch.documents.to(device);
    const parallel::Passing::Scope scope(passing);
    const at::Tensor output = model.forward(batch.input.to(device));
    const at::NoGradGuard no_grad;
    loss += model.model().loss_sum(output, target, {}).item<double>();
    count += double((has_words ? target.numel() : target.size(0)) - batch.num_ignored);
    if (model.model().num_right) right += model.model().num_right(output, target).item<double>();
    progress.update(uint64_t(first) + numbers.size());
  }
  observe::JsonObject object({{"samples", samples}, {"loss", loss / count}});
  std::string line = cat(samples, " samples", kept > 0 ? " kept for evaluation" : "", ", loss ",
                         observe::json_number(loss / count));
  if (has_words) {
    object.add("perplexity", std::exp(loss / count));
    line += cat(", perplexity ", observe::json_number(std::exp(loss / count)));
  }
  if (model.model().num_right && !std::isnan(right)) {
    object.add("accuracy", right / count);
    line += cat(", accuracy ", observe::json_number(100 * right / count), " %");
  }
  std::cout << (options.json ? object.text() : line) << "\n";
}

void add_common(CLI::App* verb, Options& options) {
  verb->add_option("MODEL", options.path,
                   "A run, a checkpoint, or a Hugging Face folder; of a run its newest checkpoint")
      ->required();
  verb->add_option("--device", options.device, "cpu, cuda:0, auto")->capture_default_str();
  verb->add_option("--dtype", options.dtype, "What is computed in: fp32, bf16, fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  verb->add_flag("--json", options.json, "One JSON object");
}

}  // namespace

void add_generate(CLI::App& app) {
  auto* verb = app.add_subcommand("generate", "Let a model of words go on with a text");
  auto options = std::make_shared<Options>();
  add_common(verb, *options);
  auto& [tokens, sampling, end, on_token] = options->generate;
  verb->add_option("--prompt", options->prompt, "How the text begins; - reads it from the input");
  verb->add_option("--tokens", tokens, "The most that are added")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--temperature", sampling.temperature, "0: always the likeliest token")
      ->capture_default_str();
  verb->add_option("--top-k", sampling.top_k, "Only out of so many likeliest; 0: of all")
      ->capture_default_str();
  verb->add_option("--top-p", sampling.top_p,
                   "Only out of the likeliest that have so much together")
      ->capture_default_str();
  verb->add_option("--seed", sampling.seed, "The same seed gives the same text")
      ->capture_default_str();
  verb->add_option("--tokenizer", options->tokenizer,
                   "A tokenizer.json, a .model, a folder with one, or bytes; else the model's own");
  verb->callback([options] { generate(*options); });
}

void add_eval(CLI::App& app) {
  auto* verb = app.add_subcommand("eval", "How good a model is on data it has not seen");
  auto options = std::make_shared<Options>();
  add_common(verb, *options);
  verb->add_option("KEYS", options->overrides,
                   "section.key=value on top of the run's config, as data.path=other.txt; with "
                   "data.val_fraction the last part, else all");
  verb->add_option("--samples", options->samples, "At most so many; 0: all")->capture_default_str();
  verb->callback([options] { eval(*options); });
}

}  // namespace yoke::cli
