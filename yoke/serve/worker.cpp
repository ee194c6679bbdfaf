// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/worker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/serve/channel.h"
#include "yoke/serve/control.h"
#include "yoke/serve/request.h"

namespace yoke::serve {
namespace {

constexpr size_t kMostText = 16 << 10;  // of an error

int64_t now_ns() { return SteadyClock().now().time_since_epoch().count(); }

size_t bytes_of(plan::Type type, const plan::Shape& shape, size_t bytes) {
  if (type == plan::Type::Bytes) return bytes;
  const auto count = plan::num_elements(shape);
  if (!count) fail(Kind::Internal, "an output of ", plan::to_text(type, shape));
  return size_t(*count) * plan::size_of(type);
}

// Straight into the slab.
class SlabOutputs final : public Outputs {
 public:
  SlabOutputs(const Slab& slab, uint64_t room) : slab_(slab), room_(room) {
    slab_.header->num_outputs = 0;
    at_ = slab_.header->inputs_end;
  }
  std::span<std::byte> add(plan::Type type, const plan::Shape& shape, size_t given) override {
    auto& header = *slab_.header;
    const size_t bytes = bytes_of(type, shape, given);
    at_ = (at_ + 63) / 64 * 64;
    if (header.num_outputs == kMaxTensors || shape.size() > kMaxRank)
      fail(Kind::Usage, "the model gives more than ", kMaxTensors,
           " outputs, or one with more than ", kMaxRank, " dimensions");
    if (at_ + bytes > room_) {
      const auto rows = SlabState::of(header.state.load()).rows;
      const auto part = double(room_ - header.inputs_end) / double(at_ + bytes - header.inputs_end);
      header.fits = std::max<uint32_t>(1, std::min(rows - 1, uint32_t(double(rows) * part)));
      fail(Kind::Usage, "the model's outputs take more than the ", room_ >> 20,
           " MiB that there are; serve.slab_mb makes it more");
    }
    auto& place = header.outputs[header.num_outputs++];
    place = {.offset = at_, .bytes = bytes, .type = int32_t(type), .rank = int32_t(shape.size())};
    std::ranges::copy(shape, place.shape.begin());
    at_ += bytes;
    header.outputs_end = at_;
    return {slab_.data + place.offset, bytes};
  }

 private:
  const Slab& slab_;
  const uint64_t room_;
  uint64_t at_ = 0;
};

// Of some rows of a batch, kept aside until all are there.
struct Part final : Outputs {
  struct Kept {
    plan::Type type;
    plan::Shape shape;
    std::vector<std::byte> bytes;
  };
  std::vector<Kept> kept = {};
  int64_t first = 0, rows = 0;
  std::span<std::byte> add(plan::Type type, const plan::Shape& shape, size_t given) override {
    kept.push_back({type, shape, std::vector<std::byte>(bytes_of(type, shape, given))});
    return kept.back().bytes;
  }
};

Call rows_of(const Call& call, int64_t first, int64_t rows) {
  Call part = call;
  for (auto& input : part.inputs) {
    const size_t row = input.bytes / size_t(input.shape[0]);
    input.data += row * size_t(first);
    input.bytes = row * size_t(rows);
    input.shape[0] = rows;
  }
  return part;
}

class Worker {
 public:
  Worker(Runner& runner, Channel& channel, int to_router)
      : runner_(runner), channel_(channel), to_router_(to_router) {}

  void loop(int line) {
    for (int next = 0;; next = (next + 1) % Channel::kSlabs) {
      const Slab& slab = channel_.slab(next);
      if (!seal(slab, line)) return;
      compute(slab);
      auto& state = slab.header->state;
      state.store(SlabState{Phase::Done, SlabState::of(state.load()).rows}.word());
      tell_router();
      if (const auto parts = runner_.breakdown(); !parts.empty()) tell_parts(line, parts);
    }
  }

 private:
  // Waits for rows and closes the batch; false when it is time to end.
  bool seal(const Slab& slab, int line) {
    auto& state = slab.header->state;
    for (;;) {
      const auto seen = channel_.to_worker().key();
      uint32_t word = state.load();
      while (SlabState::of(word).phase == Phase::Open)
        if (state.compare_exchange_weak(
                word, SlabState{Phase::Sealed, SlabState::of(word).rows}.word())) {
          slab.header->sealed_at = now_ns();
          return true;
        }
      if (channel_.stop().load() != 0) return false;
      channel_.to_worker().wait(seen, SteadyClock().now() + std::chrono::seconds(1));
      if (channel_.to_worker().key() != seen) continue;  // somebody is there
      const auto message = receive_message(line, {});
      if (message && message->text.empty()) return false;
    }
  }

  // In pieces, the last of which says so.
  static void tell_parts(int line, std::string_view parts) {
    constexpr size_t kPiece = kMostBytes / 2;
    for (; parts.size() > kPiece; parts.remove_prefix(kPiece))
      send_message(line, cat("part ", parts.substr(0, kPiece)));
    send_message(line, cat("parts ", parts));
  }

  void tell_router() {
    const uint64_t one = 1;
    if (::write(to_router_, &one, sizeof(one)) < 0) return;  // full: it is told already
  }

  void compute(const Slab& slab) {
    auto& header = *slab.header;
    const auto rows = SlabState::of(header.state.load()).rows;
    header.result = Result::Ok;
    header.fits = 0;
    header.set_error({});
    std::fill_n(slab.failed, rows, 0);
    std::copy_n(slab.owners, rows, slab.owners_back);
    try {
      Call call{.sequence = header.sequence.data(),
                .sequence_start = header.sequence_start != 0,
                .sequence_end = header.sequence_end != 0};
      for (uint32_t i = 0; i < header.num_inputs; ++i) {
        const auto& place = header.inputs[i];
        TensorView view{.type = plan::Type(place.type),
                        .shape = {place.shape.begin(), place.shape.begin() + place.rank},
                        .data = slab.data + place.offset,
                        .bytes = place.bytes};
        if (header.has_rows) {
          view.shape[0] = rows;
          view.bytes = place.bytes * rows;  // what the router says is of one row
        }
        call.inputs.push_back(std::move(view));
      }
      header.begun_at = header.computed_at = now_ns();
      if (header.is_prompt)
        generate(slab, call);
      else
        run(slab, call, rows);
    } catch (const Error& error) {  // of a prompt: it is too long, or none
      header.result =
          header.is_prompt && error.kind() == Kind::Usage ? Result::Invalid : Result::Failed;
      header.set_error(error.what());
    } catch (const std::exception& error) {
      header.result = Result::Failed;
      header.set_error(error.what());
    }
    header.done_at = now_ns();
    channel_.progress().fetch_add(1);
  }

  void run(const Slab& slab, const Call& call, uint32_t rows) {
    auto& header = *slab.header;
    const bool apart = header.has_rows != 0 && runner_.facts().pure;
    try {
      try {
        run_whole(slab, call, rows);
      } catch (const std::exception&) {
        if (!apart || rows < 2 || header.fits > 0) throw;
        by_halves(slab, call, rows);
      }
    } catch (const std::exception& error) {
      if (!apart || header.fits == 0) throw;
      header.result = Result::TooMany;
      header.set_error(error.what());
    }
  }

  void run_whole(const Slab& slab, const Call& call, uint32_t rows) {
    auto& header = *slab.header;
    SlabOutputs outputs(slab, channel_.data_bytes());
    runner_.run(call, outputs);
    header.computed_at = now_ns();
    const auto copies = runner_.copies();
    header.copy_in = copies.in.count();
    header.copy_out = copies.out.count();
    header.copies = copies.whole.count();
    check_rows(slab, rows);
  }

  static void check_rows(const Slab& slab, uint32_t rows) {
    const auto& header = *slab.header;
    for (uint32_t i = 0; header.has_rows && i < header.num_outputs; ++i)
      if (header.outputs[i].rank == 0 || header.outputs[i].shape[0] != rows)
        fail(
            Kind::Internal, "the model gave ",
            plan::to_text(plan::Type(header.outputs[i].type),
                          std::span(header.outputs[i].shape).first(size_t(header.outputs[i].rank))),
            " for ", rows, " rows");
  }

  // What Slab::failed says of a row that failed so; rows that fail alike share a place.
  static uint8_t keep_error(SlabHeader& header, const char* text, size_t& kept) {
    header.set_error(text);
    const auto has = std::span(header.row_errors).first(kept);
    const auto same = std::ranges::find(has, std::string_view(header.error.data()),
                                        [](const auto& one) { return one.data(); });
    const auto at = size_t(same - has.begin());
    if (at == kept && kept < kMaxRowErrors) header.row_errors[kept++] = header.error;
    return uint8_t(1 + at);
  }

  void by_halves(const Slab& slab, const Call& call, uint32_t rows) {
    std::vector<Part> parts;
    std::vector<std::pair<int64_t, int64_t>> left{{rows / 2, rows}, {0, rows / 2}};
    size_t kept = 0;
    while (!left.empty()) {
      const auto [first, end] = left.back();
      left.pop_back();
      channel_.progress().fetch_add(1);
      Part part;
      part.first = first;
      part.rows = end - first;
      try {
        runner_.run(rows_of(call, first, end - first), part);
        for (const auto& output : part.kept)
          if (output.shape.empty() || output.shape[0] != end - first)
            fail(Kind::Internal, "the model gave ", plan::to_text(output.type, output.shape),
                 " for ", end - first, " rows");
        parts.push_back(std::move(part));
      } catch (const std::exception& error) {
        const int64_t middle = (first + end) / 2;
        if (end - first == 1) {
          slab.failed[first] = keep_error(*slab.header, error.what(), kept);
        } else {
          left.emplace_back(middle, end);
          left.emplace_back(first, middle);
        }
      }
    }
    if (parts.empty()) fail(Kind::Internal, slab.header->error.data());
    slab.header->result = Result::SomeRowsFailed;
    slab.header->computed_at = now_ns();
    assemble(slab, parts, rows);
  }

  void assemble(const Slab& slab, const std::vector<Part>& parts, uint32_t rows) {
    SlabOutputs outputs(slab, channel_.data_bytes());
    for (size_t i = 0; i < parts[0].kept.size(); ++i) {
      const auto& like = parts[0].kept[i];
      plan::Shape shape = like.shape;
      shape[0] = rows;
      const size_t row = like.bytes.size() / size_t(parts[0].rows);
      const auto room = outputs.add(like.type, shape, row * rows);
      std::ranges::fill(room, std::byte{0});
      for (const auto& part : parts) {
        if (i >= part.kept.size() || part.kept[i].bytes.size() != row * size_t(part.rows))
          fail(Kind::Internal, "the model's outputs differ from row to row");
        std::ranges::copy(part.kept[i].bytes, room.begin() + ptrdiff_t(row * size_t(part.first)));
      }
    }
  }

  void generate(const Slab& slab, const Call& call) {
    auto& header = *slab.header;
    const auto text = [&](size_t i) {
      return std::string(reinterpret_cast<const char*>(call.inputs[i].data), call.inputs[i].bytes);
    };
    header.num_outputs = 0;
    runner_.generate(text(0), text(1), [&](std::string_view piece) {
      const uint64_t have = header.streamed.load();
      if (header.inputs_end + have + piece.size() > channel_.data_bytes()) return false;
      std::memcpy(slab.data + header.inputs_end + have, piece.data(), piece.size());
      header.streamed.store(have + piece.size());
      channel_.progress().fetch_add(1);
      if (!piece.empty()) tell_router();
      return header.cancelled.load() == 0;
    });
    header.outputs_end = header.inputs_end + header.streamed.load();
    header.computed_at = now_ns();
  }

  Runner& runner_;
  Channel& channel_;
  const int to_router_;
};

}  // namespace

void Runner::generate(const std::string&, const std::string&,
                      const std::function<bool(std::string_view)>&) {
  fail(Kind::Usage, "the model does not go on with prompts");
}

void run_worker(net::Descriptor line, const OpenRunner& open) {
  auto hello = receive_message(line.get(), SteadyClock().now() + std::chrono::seconds(60));
  if (!hello || hello->files.size() != 2) return;  // the router is gone
  std::unique_ptr<Runner> runner;
  try {
    runner = open(parse_spec(hello->text));
    Channel channel(std::move(hello->files[0]));
    send_message(line.get(), "ready " + to_json(runner->facts()));
    Worker(*runner, channel, hello->files[1].get()).loop(line.get());
  } catch (const std::exception& error) {
    send_message(line.get(), cat("failed ", std::string_view(error.what()).substr(0, kMostText)));
  } catch (const Fatal& fatal) {
    send_message(line.get(), cat("failed ", std::string_view(fatal.text).substr(0, kMostText)));
    (void)runner.release();  // what an error of a GPU has left cannot be taken apart in order
  }
}

std::string to_json(const Prompt& prompt) {
  return nlohmann::json{{"tokens", prompt.tokens},
                        {"temperature", prompt.temperature},
                        {"top_k", prompt.top_k},
                        {"top_p", prompt.top_p},
                        {"seed", prompt.seed}}
      .dump();
}

Prompt parse_prompt(const std::string& text, const std::string& how) {
  const auto from = nlohmann::json::parse(how);
  return {.text = text,
          .tokens = from.at("tokens"),
          .temperature = from.at("temperature"),
          .top_k = from.at("top_k"),
          .top_p = from.at("top_p"),
          .seed = from.at("seed")};
}

}  // namespace yoke::serve
