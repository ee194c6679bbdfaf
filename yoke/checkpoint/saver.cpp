// SPDX-License-Identifier: Apache-2.0
#include "yoke/checkpoint/saver.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "yoke/base/crc32c.h"
#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/saved.h"
#include "yoke/comm/error_text.h"

namespace yoke::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr auto kRound = std::chrono::milliseconds(100);

std::string numbered(const char* what, int rank, const char* end) {
  std::string digits = std::to_string(rank);
  return cat(what, "-", std::string(5 - std::min<size_t>(5, digits.size()), '0'), digits, end);
}
std::string data_name(int rank) { return numbered("rank", rank, ".safetensors"); }
std::string part_name(int rank) { return numbered("part", rank, ".json"); }
std::string failure_name(int rank) { return numbered("part", rank, ".failed"); }

// Of this rank, in host memory.
std::vector<Piece> staged(const std::vector<Piece>& pieces) {
  const at::NoGradGuard no_grad;
  std::vector<Piece> copies = pieces;
  for (auto& piece : copies) {
    YOKE_CHECK(piece.value.sizes() == at::IntArrayRef(piece.box.shape));
    piece.value = piece.value.detach().to(at::kCPU, piece.value.scalar_type(),
                                          /*non_blocking=*/false, /*copy=*/true,
                                          at::MemoryFormat::Contiguous);
  }
  return copies;
}

void write_part(const Path& folder, int rank, const std::vector<Piece>& pieces) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  ordered_json part = ordered_json::array();
  for (const auto& piece : pieces) {
    const bool whole = piece.box == plan::whole_box(piece.shape);
    const std::string key = whole ? piece.name : piece.name + to_text(piece.box);
    tensors.emplace_back(key, piece.value);
    part.push_back({{"name", piece.name},
                    {"dtype", dtype_name(piece.value.scalar_type())},
                    {"shape", piece.shape},
                    {"offset", piece.box.offset},
                    {"extent", piece.box.shape},
                    {"file", data_name(rank)},
                    {"key", key},
                    {"crc32c", crc32c(piece.value.const_data_ptr(), piece.value.nbytes())}});
  }
  write_safetensors(folder / data_name(rank), tensors, {{"format", "pt"}});
  write_durably(folder / part_name(rank), part.dump());
}

// By rank 0: waits for everybody's part, and gives the index.
std::string collect(const Path& folder, int ranks, int64_t step, const Strings& values,
                    Duration timeout, const std::atomic<bool>& abandoned) {
  const SteadyClock clock;
  const Time until = clock.now() + timeout;
  ordered_json tensors;
  std::map<std::string, std::pair<std::vector<int64_t>, std::vector<plan::Box>>> boxes;
  for (int rank = 0; rank < ranks; ++rank) {
    while (!std::filesystem::exists(folder / part_name(rank))) {
      for (int other = 0; other < ranks; ++other)
        if (std::filesystem::exists(folder / failure_name(other)))
          fail(Kind::Io, "rank ", other, ": ", read_text(folder / failure_name(other)));
      if (abandoned) fail(Kind::Cancelled, "the run has ended before rank ", rank, " was done");
      if (clock.now() >= until)
        fail(Kind::Timeout, "waited ", duration_text(timeout), " for rank ", rank,
             " to write its part; do all ranks see '", folder.parent_path().string(), "'?");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (auto& entry : ordered_json::parse(read_text(folder / part_name(rank)))) {
      const auto name = entry.at("name").get<std::string>();
      auto& tensor = tensors[name];
      auto& [shape, seen] = boxes[name];
      if (tensor.is_null()) {
        tensor = {{"dtype", entry.at("dtype")}, {"shape", entry.at("shape")}};
        shape = entry.at("shape").get<std::vector<int64_t>>();
      } else if (tensor.at("shape") != entry.at("shape") ||
                 tensor.at("dtype") != entry.at("dtype")) {
        fail(Kind::Internal, "ranks have saved '", name, "' in two shapes or types");
      }
      seen.push_back({entry.at("offset").get<std::vector<int64_t>>(),
                      entry.at("extent").get<std::vector<int64_t>>()});
      for (const char* key : {"name", "dtype", "shape"}) entry.erase(key);
      tensor["boxes"].push_back(std::move(entry));
    }
  }
  for (const auto& [name, known] : boxes)
    if (const auto gap = find_gap(known.first, known.second))
      fail(Kind::Internal, "'", name, "' was not saved as a whole: ", *gap);
  const ordered_json index = {{"format", "yoke checkpoint 1"},
                              {"step", step},
                              {"values", values},
                              {"tensors", tensors.is_null() ? ordered_json::object() : tensors}};
  for (int rank = 0; rank < ranks; ++rank) std::filesystem::remove(folder / part_name(rank));
  return index.dump(1) + "\n";
}

}  // namespace

class Saver::Impl {
 public:
  Impl(Path folder, const comm::Communicator& comm, SaverOptions options)
      : folder_(std::move(folder)), comm_(comm), options_(options) {
    if (options_.keep < 1)
      fail(Kind::Usage, "keep wants 1 or more checkpoints, got ", options_.keep);
    if (comm_.rank() != 0) return;
    make_folder(folder_);
    lock_.emplace(folder_);
    // What a run before has left in the middle of it.
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with(".step-") || name.starts_with(".gone."))
        std::filesystem::remove_all(entry.path());
    }
  }
  ~Impl() {
    if (std::uncaught_exceptions() > 0) abandoned_ = true;  // the others may never be done
    if (writing_.valid()) writing_.wait();
  }

  void save(int64_t step, const Contents& contents) {
    const SteadyClock clock;
    const Time start = clock.now();
    settle();
    outcome_.reset();
    const int rank = comm_.rank(), ranks = comm_.size();
    const auto folder_of = [&](int64_t mark) {
      return folder_ / cat(".", step_name(step), ".", mark);
    };
    // Nobody writes into a folder that another run may still have.
    const int64_t now = int64_t(start.time_since_epoch().count()) & INT64_MAX;
    int64_t mark = now ^ (int64_t(::getpid()) << 40 & INT64_MAX);
    if (rank == 0) try {
        make_folder(folder_of(mark));
      } catch (const Error& error) {
        outcome_ = cat("the checkpoint of step ", step, " was not saved: ", error.what());
        mark = -1;
      }
    mark = agree(mark);
    held_up_ = clock.now() - start;
    if (mark < 0) return;
    const Path folder = folder_of(mark);
    auto write = [=, this, pieces = staged(contents.pieces), values = contents.values]() {
      std::optional<std::string> failure;
      try {
        write_part(folder, rank, pieces);
        if (rank == 0) commit(folder, step, ranks, values);
      } catch (const std::exception& error) {
        failure = cat("the checkpoint of step ", step, " was not saved: ", comm::text_of(error));
        give_up(folder, rank, comm::text_of(error));
      }
      return failure;
    };
    writing_ = std::async(std::launch::async, std::move(write));
    if (!options_.async) settle();
    held_up_ = clock.now() - start;
  }

  std::optional<std::string> wait() {
    settle();
    if (agree(outcome_ ? 1 : 0) == 0) return std::nullopt;
    if (comm_.rank() != 0) return "the checkpoint was not saved; rank 0 knows why";
    return outcome_;
  }

  Duration held_up() const { return held_up_; }

 private:
  // The last save is over, on all ranks. In short rounds: a disk may take longer than a rank waits
  // for another.
  void settle() {
    bool all_done = false;
    while (!all_done) {
      const bool done = !writing_.valid() || writing_.wait_for(kRound) == std::future_status::ready;
      const at::Tensor least = number(done ? 1 : 0);
      comm_.all_reduce(least, comm::ReduceOp::Min).wait();
      all_done = least.item<int64_t>() == 1;
    }
    if (!writing_.valid()) return;
    auto failure = writing_.get();
    if (failure) outcome_ = std::move(failure);
  }

  at::Tensor number(int64_t value) const {
    const bool on_cpu = comm_.capabilities().cpu;
    return at::full({1}, value, at::device(on_cpu ? at::kCPU : at::kCUDA).dtype(at::kLong));
  }
  int64_t agree(int64_t mine) const {
    const at::Tensor value = number(mine);
    comm_.broadcast(value, 0).wait();
    return value.item<int64_t>();
  }

  void commit(const Path& folder, int64_t step, int ranks, const Strings& values) const {
    const Path target = folder_ / step_name(step);
    write_durably(folder / kIndexName,
                  collect(folder, ranks, step, values, options_.timeout, abandoned_));
    replace_durably(folder, target);
    try {
      if (std::filesystem::exists(folder)) remove_folder(folder);  // what was saved of it before
      auto all = list(folder_);
      for (size_t i = 0; i + size_t(options_.keep) < all.size(); ++i) remove_folder(all[i]);
    } catch (const Error&) {  // the new one is there; what cannot be removed now may be later
    }
  }

  // Makes room first: the disk may be full.
  static void give_up(const Path& folder, int rank, const std::string& why) noexcept {
    try {
      std::filesystem::remove(folder / data_name(rank));
      if (rank == 0)
        std::filesystem::remove_all(folder);
      else
        write_durably(folder / failure_name(rank), why);
    } catch (const std::exception&) {  // rank 0 stops waiting in time
    }
  }

  const Path folder_;
  const comm::Communicator comm_;
  const SaverOptions options_;
  std::optional<FolderLock> lock_;  // rank 0's
  std::future<std::optional<std::string>> writing_;
  std::optional<std::string> outcome_;  // why the last save has failed
  Duration held_up_{};
  std::atomic<bool> abandoned_{false};
};

Saver::Saver(Path folder, const comm::Communicator& comm, SaverOptions options)
    : impl_(std::make_unique<Impl>(std::move(folder), comm, options)) {}
Saver::~Saver() = default;
void Saver::save(int64_t step, const Contents& contents) { impl_->save(step, contents); }
std::optional<std::string> Saver::wait() { return impl_->wait(); }
Duration Saver::held_up() const { return impl_->held_up(); }

}  // namespace yoke::checkpoint
