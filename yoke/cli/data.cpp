// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/data.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/files.h"
#include "yoke/cli/job_progress.h"
#include "yoke/data/images.h"
#include "yoke/data/tokenizer.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string path = {}, kind = "auto", tokenizer = {}, file = {};
  int64_t seq = 128, vocab = 0, size = 0;
};

std::shared_ptr<const data::Tokenizer> tokenizer_of(const Options& options) {
  return data::open_tokenizer(options.tokenizer.empty() ? "bytes" : options.tokenizer);
}

// By the names of the files.
std::string guess_kind(const fs::path& path) {
  const auto kind_of = [](const fs::path& file) -> std::string {
    std::string ending = file.extension().string();
    for (auto& c : ending) c = char(std::tolower(c));
    if (ending == ".bin" || ending == ".npy") return "tokens";
    if (ending == ".png" || ending == ".jpg" || ending == ".jpeg") return "images";
    return file.filename().string().find("idx3") != std::string::npos ? "images" : "";
  };
  if (!fs::exists(path)) fail(Kind::Usage, "there is no '", path.string(), "'");
  if (!fs::is_directory(path)) return kind_of(path).empty() ? "text" : kind_of(path);
  for (const auto& entry : fs::recursive_directory_iterator(path))
    if (const auto kind = kind_of(entry.path()); !kind.empty()) return kind;
  return "text";
}

void check_text(const Options& options) {
  const auto tokenizer = tokenizer_of(options);
  int64_t files = 0, bytes = 0, tokens = 0, left_out = 0;
  const auto all = data::text_files(options.path);
  JobProgress progress("check", all.size(), "files");
  for (const auto& file : all) {
    const std::string text = data::read_text(file);
    progress.update(uint64_t(++files));
    if (!data::is_text(text)) {
      ++left_out;
      continue;
    }
    bytes += int64_t(text.size());
    tokens += int64_t(tokenizer->encode(text).size());
  }
  std::cout << "text: " << files - left_out << " files, " << bytes << " bytes, " << tokens
            << " tokens, " << (tokens - 1) / options.seq << " samples of " << options.seq
            << " tokens; " << left_out << " files with a zero byte are left out\n";
}

// Every sample, read as training would.
void check_samples(const Options& options, const data::Dataset& dataset, const std::string& about) {
  JobProgress progress("check", uint64_t(dataset.size()), "samples");
  int64_t bad = 0;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    try {
      dataset.batch({i});
    } catch (const Error& error) {
      std::cout << error.what() << "\n";
      ++bad;
    }
    progress.update(uint64_t(i + 1));
  }
  std::cout << about << "\n";
  if (bad > 0)
    fail(Kind::Io, bad, " of ", dataset.size(), " samples in '", options.path, "' cannot be read");
}

void check(const Options& given) {
  Options options = given;
  if (options.kind == "auto") options.kind = guess_kind(options.path);
  if (options.kind == "text") return check_text(options);
  if (options.kind == "tokens") {
    const int64_t vocab = options.vocab > 0 ? options.vocab : 1 << 16;
    const auto dataset = data::open_tokens(options.path, options.seq, vocab);
    return check_samples(
        options, *dataset,
        cat("tokens below ", vocab, ": ", dataset->size(), " samples of ", options.seq, " tokens"));
  }
  const auto images = data::open_images(options.path, {.size = options.size});
  check_samples(
      options, *images,
      cat("images: ", images->size(), " of ", images->num_classes(), " classes (",
          join(images->class_names(), ", "), "), ", images->height(), " x ", images->width()));
}

void tokens(const Options& options) {
  for (const int64_t token : tokenizer_of(options)->encode(data::read_text(options.file)))
    std::cout << token << "\n";
}

void text(const Options& options) {
  std::vector<int64_t> numbers;
  std::istringstream lines(data::read_text(options.file));
  for (std::string line; std::getline(lines, line);) {
    const auto number = parse_int(line);
    if (!number) fail(Kind::Usage, "'", options.file, "' has '", line, "' where a token should be");
    numbers.push_back(*number);
  }
  const std::string result = tokenizer_of(options)->decode(numbers);
  std::fwrite(result.data(), 1, result.size(), stdout);
}

void encode(const Options& options) {
  const auto tokenizer = tokenizer_of(options);
  const bool wide = tokenizer->vocab() > 1 << 16;
  std::string all;
  int64_t count = 0;
  const auto put = [&](int64_t token) {
    const auto value = uint32_t(token);
    all.append(reinterpret_cast<const char*>(&value), wide ? 4 : 2);
    ++count;
  };
  const auto files = data::text_files(options.path);
  JobProgress progress("encode", files.size(), "files");
  for (int64_t done = 0; const auto& file : files) {
    const std::string content = data::read_text(file);
    progress.update(uint64_t(++done));
    if (!data::is_text(content)) continue;
    for (const int64_t token : tokenizer->encode(content)) put(token);
    if (tokenizer->end() && !content.empty()) put(*tokenizer->end());
  }
  checkpoint::write_durably(options.file, all);
  std::cout << count << " tokens of " << (wide ? 32 : 16) << " bits in " << options.file
            << "; train with data.kind=tokens data.path=" << options.file
            << " model.vocab=" << tokenizer->vocab();
  if (tokenizer->end()) std::cout << " data.documents=true data.end=" << *tokenizer->end();
  std::cout << "\n";
}

}  // namespace

void add_data(CLI::App& app) {
  auto* verb = app.add_subcommand("data", "Check data, and turn text into tokens and back");
  verb->require_subcommand(1);
  auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* about, void (*run)(const Options&)) {
    auto* sub = verb->add_subcommand(name, about);
    sub->callback([=] { run(*options); });
    return sub;
  };
  const auto takes_tokenizer = [&](CLI::App* sub) {
    sub->add_option("TOKENIZER", options->tokenizer,
                    "A tokenizer.json, a .model, a folder with one, or bytes")
        ->required();
    return sub;
  };
  auto* looks = add("check", "Read all of it, and say what it is and what is wrong", check);
  looks->add_option("PATH", options->path, "A file or a folder")->required();
  looks->add_option("--kind", options->kind, "auto, text, tokens, images")
      ->check(CLI::IsMember({"auto", "text", "tokens", "images"}))
      ->capture_default_str();
  looks->add_option("--tokenizer", options->tokenizer, "Of text; else bytes");
  looks->add_option("--seq", options->seq, "Tokens of a sample, as model.seq")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  looks
      ->add_option("--size", options->size,
                   "Of images, as model.size; 0: all as large as the first")
      ->capture_default_str();
  looks->add_option("--vocab", options->vocab, "Of tokens, as model.vocab; 0: 65536")
      ->capture_default_str();
  takes_tokenizer(add("tokens", "The tokens of a text file, one a line", tokens))
      ->add_option("FILE", options->file, "The text")
      ->required();
  takes_tokenizer(add("text", "The text of tokens, one a line", text))
      ->add_option("FILE", options->file, "The tokens")
      ->required();
  auto* out = takes_tokenizer(add("encode", "Text to a .bin file of tokens, to train on", encode));
  out->add_option("PATH", options->path, "A file, or a folder of them")->required();
  out->add_option("FILE", options->file, "The .bin file to be written")->required();
}

}  // namespace yoke::cli
