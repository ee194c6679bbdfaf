// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/checkpoint.h"

#include <ATen/Functions.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/saved.h"
#include "yoke/checkpoint/saver.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/models/hugging_face.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

using checkpoint::Path;
using checkpoint::Saved;

const std::string kModel = "model/";

struct Options {
  std::string path = {}, other = {}, format = "safetensors";
  std::string dtype = {};
  bool json = false;
};

Saved open(const std::string& path) { return Saved(checkpoint::find(path).back()); }

int64_t bytes_of(const Saved& saved) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : saved.tensors()) bytes += tensor.bytes();
  return bytes;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::vector<std::string> words;
  for (const int64_t size : shape) words.push_back(cat(size));
  return cat("[", join(words, ", "), "]");
}

void ls(const Options& options) {
  for (const auto& path : checkpoint::find(options.path)) {
    const Saved saved(path);
    if (options.json)
      std::cout << observe::JsonObject({{"path", path.string()},
                                        {"step", saved.step()},
                                        {"tensors", saved.tensors().size()},
                                        {"bytes", bytes_of(saved)}})
                       .text()
                << "\n";
    else
      std::printf("step %8ld   %5zu tensors   %10s   %s\n", long(saved.step()),
                  saved.tensors().size(), bytes_text(uint64_t(bytes_of(saved))).c_str(),
                  path.c_str());
  }
}

void show(const Options& options) {
  const Saved saved = open(options.path);
  std::cout << "step = " << saved.step() << "\n";
  for (const auto& [name, value] : saved.values())
    if (name != "config") std::cout << name << " = " << value << "\n";
  if (saved.values().contains("config")) std::cout << "\n" << saved.value("config") << "\n";
  for (const auto& [name, tensor] : saved.tensors())
    std::printf("%-48s %-5s %-20s %zu boxes\n", name.c_str(),
                checkpoint::dtype_name(tensor.dtype).c_str(), shape_text(tensor.shape).c_str(),
                tensor.boxes.size());
}

void verify(const Options& options) {
  size_t wrong = 0;
  for (const auto& path : checkpoint::find(options.path)) {
    const auto found = Saved(path).verify();
    for (const auto& line : found) std::cout << path.string() << ": " << line << "\n";
    if (found.empty()) std::cout << path.string() << ": good\n";
    wrong += found.size();
  }
  if (wrong > 0) fail(Kind::Io, wrong, wrong == 1 ? " tensor is" : " tensors are", " damaged");
}

// The model alone, as one file.
void export_model(const Options& options) {
  if (const std::vector<std::string> known{"", "F64", "F32", "F16", "BF16"};
      std::ranges::find(known, options.dtype) == known.end())
    fail(Kind::Usage, "--dtype is F64, F32, F16 or BF16, got '", options.dtype, "'");
  const Saved saved = open(options.path);
  const auto read = [&](const std::string& name) {
    const at::Tensor value = saved.whole(name);
    return !options.dtype.empty() && at::isFloatingType(value.scalar_type())
               ? value.to(checkpoint::parse_dtype(options.dtype))
               : value;
  };
  if (options.format == "hugging-face") {
    const auto words = models::parse_config(saved.value("architecture"), options.path);
    models::write_hugging_face(options.other, words,
                               [&](const std::string& name) { return read(kModel + name); });
    std::cout << "step " << saved.step() << " in " << options.other
              << ", for AutoModelForCausalLM.from_pretrained\n";
    return;
  }
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, tensor] : saved.tensors())
    if (name.starts_with(kModel)) tensors.emplace_back(name.substr(kModel.size()), read(name));
  if (tensors.empty()) fail(Kind::Io, "there is no model in '", options.path, "'");
  checkpoint::write_safetensors(options.other, tensors,
                                {{"format", "pt"}, {"step", cat(saved.step())}});
  std::cout << tensors.size() << " tensors of step " << saved.step() << " in " << options.other
            << "\n";
}

// The other way round: a run begins with it.
void import_model(const Options& options) {
  const checkpoint::SafetensorsFile file(options.path);
  checkpoint::Contents contents{.values = {{"samples", "0"}, {"optimizer_steps", "0"}}};
  for (const auto& name : file.names()) {
    const at::Tensor value = file.tensor(name);
    const auto shape = value.sizes().vec();
    contents.pieces.push_back({kModel + name, shape, plan::whole_box(shape), value});
  }
  comm::run_ranks(1, [&](comm::Communicator& comm) {
    checkpoint::Saver saver(options.other, comm, {.keep = INT64_MAX, .async = false});
    saver.save(0, contents);
    if (const auto failure = saver.wait()) fail(Kind::Io, *failure);
  });
  std::cout << contents.pieces.size() << " tensors in "
            << (Path(options.other) / checkpoint::step_name(0)).string() << "\n";
}

void diff(const Options& options) {
  const Saved one = open(options.path), two = open(options.other);
  size_t different = 0;
  const auto tell = [&](const std::string& what) {
    std::cout << what << "\n";
    ++different;
  };
  if (one.step() != two.step()) tell(cat("step: ", one.step(), " and ", two.step()));
  for (const auto& [name, tensor] : one.tensors()) {
    const auto other = two.tensors().find(name);
    if (other == two.tensors().end()) {
      tell(cat(name, ": only in the first"));
    } else if (other->second.shape != tensor.shape || other->second.dtype != tensor.dtype) {
      tell(cat(name, ": ", shape_text(tensor.shape), " ", checkpoint::dtype_name(tensor.dtype),
               " and ", shape_text(other->second.shape), " ",
               checkpoint::dtype_name(other->second.dtype)));
    } else if (const at::Tensor a = one.whole(name), b = two.whole(name); !at::equal(a, b)) {
      const at::Tensor apart = (a.to(at::kDouble) - b.to(at::kDouble)).abs();
      tell(cat(name, ": up to ", apart.max().item<double>(), " apart, in ",
               (apart > 0).sum().item<int64_t>(), " of ", a.numel(), " elements"));
    }
  }
  for (const auto& [name, tensor] : two.tensors())
    if (!one.tensors().contains(name)) tell(cat(name, ": only in the second"));
  if (different > 0) throw CLI::RuntimeError(1);
  std::cout << "the same, bit by bit: " << one.tensors().size() << " tensors of step " << one.step()
            << "\n";
}

}  // namespace

void add_checkpoint(CLI::App& app) {
  auto* verb = app.add_subcommand("checkpoint", "Look at checkpoints, check them, export them");
  verb->require_subcommand(1);
  auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* about, void (*run)(const Options&)) {
    auto* sub = verb->add_subcommand(name, about);
    sub->callback([=] { run(*options); });
    return sub;
  };
  const auto takes_path = [&](CLI::App* sub) {
    sub->add_option("PATH", options->path,
                    "A checkpoint; of a folder of them, or a run's, the newest")
        ->required();
    return sub;
  };
  takes_path(add("ls", "The checkpoints of a run, one a line", ls))
      ->add_flag("--json", options->json, "One JSON object a line");
  takes_path(add("show", "What is in a checkpoint", show));
  takes_path(add("verify", "Whether every byte is as it was saved", verify));
  auto* out = takes_path(add("export", "The model alone, as one safetensors file", export_model));
  out->add_option("FILE", options->other, "The file to be written, or the folder")->required();
  out->add_option("--format", options->format,
                  "safetensors, with our names; hugging-face: a folder for transformers")
      ->check(CLI::IsMember({"safetensors", "hugging-face"}))
      ->capture_default_str();
  out->add_option("--dtype", options->dtype, "F32, F16, BF16: what numbers become");
  auto* in =
      add("import", "A checkpoint from a safetensors file, to begin a run with", import_model);
  in->add_option("FILE", options->path, "The file to be read")->required();
  in->add_option("FOLDER", options->other, "Of checkpoints, as checkpoint.dir")->required();
  takes_path(add("diff", "Where two checkpoints differ; 1 is returned if they do", diff))
      ->add_option("OTHER", options->other, "The other one")
      ->required();
}

}  // namespace yoke::cli
