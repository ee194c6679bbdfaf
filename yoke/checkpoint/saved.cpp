// SPDX-License-Identifier: Apache-2.0
#include "yoke/checkpoint/saved.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "yoke/base/crc32c.h"
#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::checkpoint {
namespace {

using nlohmann::json;

// A part of a tensor that holds `outer`.
at::Tensor part_of(at::Tensor tensor, const plan::Box& outer, const plan::Box& inner) {
  for (size_t d = 0; d < inner.shape.size(); ++d)
    tensor = tensor.narrow(int64_t(d), inner.offset[d] - outer.offset[d], inner.shape[d]);
  return tensor;
}

std::string text_of(const std::vector<int64_t>& shape) { return to_text(plan::whole_box(shape)); }

}  // namespace

std::string step_name(int64_t step) {
  const std::string digits = std::to_string(step);
  return cat("step-", std::string(8 - std::min<size_t>(8, digits.size()), '0'), digits);
}

std::vector<Path> list(const Path& folder) {
  std::vector<std::pair<int64_t, Path>> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const auto name = entry.path().filename().string();
    const auto step = name.starts_with("step-") ? parse_int(name.substr(5)) : std::nullopt;
    if (step && std::filesystem::exists(entry.path() / kIndexName))
      found.emplace_back(*step, entry.path());
  }
  std::ranges::sort(found);
  std::vector<Path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::vector<Path> find(const Path& path) {
  if (std::filesystem::exists(path / kIndexName)) return {path};
  for (const Path& folder : {path, path / "checkpoints"})
    if (auto all = list(folder); !all.empty()) return all;
  fail(Kind::Usage, "'", path.string(),
       "' is no checkpoint, and no folder of a run or of checkpoints");
}

std::optional<Path> latest(const Path& folder) {
  const auto all = list(folder);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

Saved::Saved(const Path& folder) : folder_(folder) {
  if (!std::filesystem::exists(folder / kIndexName))
    fail(Kind::Io, "'", folder.string(), "' is no checkpoint: it has no ", kIndexName);
  try {
    const json index = json::parse(read_text(folder / kIndexName));
    const auto format = index.at("format").get<std::string>();
    if (format != "yoke checkpoint 1")
      fail(Kind::Io, "its format is '", format, "', and this program reads 'yoke checkpoint 1'");
    step_ = index.at("step").get<int64_t>();
    values_ = index.at("values").get<Strings>();
    for (const auto& [name, entry] : index.at("tensors").items()) {
      Tensor tensor{.dtype = parse_dtype(entry.at("dtype").get<std::string>()),
                    .shape = entry.at("shape").get<std::vector<int64_t>>()};
      for (const auto& box : entry.at("boxes")) {
        Stored stored{.box = {box.at("offset").get<std::vector<int64_t>>(),
                              box.at("extent").get<std::vector<int64_t>>()},
                      .file = box.at("file").get<std::string>(),
                      .key = box.at("key").get<std::string>(),
                      .crc32c = box.at("crc32c").get<uint32_t>()};
        if (stored.box.shape.size() != tensor.shape.size() ||
            stored.box.offset.size() != tensor.shape.size() ||
            stored.file.find('/') != std::string::npos)
          fail(Kind::Io, "a box of '", name, "' cannot be");
        tensor.boxes.push_back(std::move(stored));
      }
      tensors_.emplace(name, std::move(tensor));
    }
  } catch (const std::exception& error) {
    fail(Kind::Io, "the index of '", folder.string(), "' cannot be read: ", error.what());
  }
}

Saved::~Saved() = default;
Saved::Saved(Saved&&) noexcept = default;

int64_t Saved::Tensor::bytes() const {
  return plan::whole_box(shape).count() * int64_t(c10::elementSize(dtype));
}

const std::string& Saved::value(const std::string& name) const {
  const auto found = values_.find(name);
  if (found != values_.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, value] : values_) names.push_back(known);
  fail(Kind::Io, "the checkpoint '", folder_.string(), "' has no '", name, "', but ",
       names.empty() ? "nothing" : join(names, ", "));
}

const SafetensorsFile& Saved::file(const std::string& name) const {
  auto& opened = files_[name];
  if (!opened) opened = std::make_unique<SafetensorsFile>(folder_ / name);
  return *opened;
}

void Saved::read(const std::vector<Piece>& wanted) const {
  const at::NoGradGuard no_grad;
  for (const auto& piece : wanted) {
    const auto found = tensors_.find(piece.name);
    if (found == tensors_.end()) {
      std::vector<std::string> names;
      for (const auto& [name, tensor] : tensors_) names.push_back(name);
      const auto close = nearest(piece.name, names);
      fail(Kind::Io, "the checkpoint '", folder_.string(), "' has no tensor '", piece.name, "'",
           close.empty() ? "" : "; the nearest is '" + close.front() + "'",
           "; was it saved by another model?");
    }
    const auto& [name, tensor] = *found;
    if (tensor.shape != piece.shape)
      fail(Kind::Io, "'", name, "' of the checkpoint '", folder_.string(), "' is ",
           text_of(tensor.shape), ", and the model's is ", text_of(piece.shape));
    int64_t left = piece.box.count();
    for (const auto& stored : tensor.boxes) {
      const auto both = intersect(stored.box, piece.box);
      if (!both) continue;
      const at::Tensor from = file(stored.file).tensor(stored.key);
      if (from.sizes() != at::IntArrayRef(stored.box.shape) || from.scalar_type() != tensor.dtype)
        fail(Kind::Io, "'", stored.key, "' in '", (folder_ / stored.file).string(),
             "' is not what the index says");
      if (*both == stored.box && crc32c(from.const_data_ptr(), from.nbytes()) != stored.crc32c)
        fail(Kind::Io, "'", stored.key, "' in '", (folder_ / stored.file).string(),
             "' has other bytes than were saved; yoke checkpoint verify tells what else has, and "
             "without this folder the one before is the newest");
      part_of(piece.value, piece.box, *both).copy_(part_of(from, stored.box, *both));
      left -= both->count();
    }
    if (left != 0)
      fail(Kind::Io, left, " elements of '", name, "' are missing in the checkpoint '",
           folder_.string(), "'");
  }
}

at::Tensor Saved::whole(const std::string& name) const {
  const auto found = tensors_.find(name);
  Piece piece{.name = name};
  if (found != tensors_.end()) {
    piece.shape = found->second.shape;
    piece.value = at::empty(piece.shape, found->second.dtype);
    piece.box = plan::whole_box(piece.shape);
  }
  read({piece});
  return piece.value;
}

std::vector<std::string> Saved::verify() const {
  std::vector<std::string> wrong;
  for (const auto& [name, tensor] : tensors_) {
    std::vector<plan::Box> boxes;
    for (const auto& stored : tensor.boxes) {
      boxes.push_back(stored.box);
      try {
        const at::Tensor value = file(stored.file).tensor(stored.key);
        const uint32_t now = crc32c(value.const_data_ptr(), value.nbytes());
        if (now != stored.crc32c)
          wrong.push_back(cat("'", stored.key, "' in ", stored.file,
                              " has other bytes than were "
                              "saved (checksum ",
                              now, ", was ", stored.crc32c, ")"));
      } catch (const Error& error) {
        wrong.emplace_back(error.what());
      }
    }
    if (const auto gap = find_gap(tensor.shape, boxes))
      wrong.push_back(cat("'", name, "': ", *gap));
  }
  return wrong;
}

}  // namespace yoke::checkpoint
