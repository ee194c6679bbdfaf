// SPDX-License-Identifier: Apache-2.0
// Batches that are done: their outputs, whose they are, and what they cost.
#include <algorithm>
#include <cstring>

#include "yoke/base/error.h"
#include "yoke/serve/pool_impl.h"

namespace yoke::serve {
namespace {

// Batches in a row that failed, after which a replica is doubted; and what of them worked elsewhere
// is enough to replace it. Where nothing can be tried again they are more, if all are of one
// tenant, whose own fault it may be.
constexpr int kFailsFast = 8, kGuilty = 3, kFailsForOne = 32;
constexpr uint64_t kLarge = 64 << 20;  // bytes of a slab that are given back
constexpr size_t kMostShapes = 256;    // of a model, that are remembered
// Part of what the longest batch took beyond others that each of them makes forgotten: one that was
// slow once must not have a worker that hangs waited for as long ever after.
constexpr double kForget = 1.0 / 1024;

Time time_of(int64_t ns) { return Time(Duration(ns)); }

// The elements of a row within those of a batch, each with its length before it.
std::string_view bytes_rows(std::string_view data, size_t each, size_t from, size_t rows) {
  size_t at = 0, begin = 0;
  for (size_t i = 0; i < each * (from + rows); ++i) {
    if (i == each * from) begin = at;
    uint32_t size = 0;
    if (at + sizeof(size) > data.size()) return {};
    std::memcpy(&size, data.data() + at, sizeof(size));
    at += sizeof(size) + size;
  }
  return at <= data.size() ? data.substr(begin, at - begin) : std::string_view();
}

// But for how many rows they have.
bool is_alike(const Tensor& one, const Tensor& other) {
  return one.type == other.type &&
         std::ranges::equal(std::span(one.shape).subspan(1), std::span(other.shape).subspan(1));
}

// Of rows that failed. Tenants are not to read of each other's, and what a batch threw as a whole
// may be about any.
std::string why_failed(const Batch& batch, const Entry& entry) {
  const auto& slab = batch.channel->slab(batch.slab);
  const auto *failed = slab.failed + entry.at, *end = failed + entry.rows;
  const auto* guilty = std::find_if(failed, end, [](uint8_t f) { return f != 0; });
  const bool alone = std::ranges::all_of(batch.entries, [&](const auto& other) {
    return other.ticket->tenant == entry.ticket->tenant;
  });
  const ErrorText* text = nullptr;
  if (guilty == end)
    text = alone || slab.header->error[0] == 0 ? &slab.header->error : nullptr;
  else if (*guilty <= kMaxRowErrors)
    text = &slab.header->row_errors[*guilty - 1u];
  if (!text) return "what it said may be about rows of others";
  if (text->front() == 0) return "it gave nothing";
  return {text->data(), ::strnlen(text->data(), text->size())};
}

}  // namespace

// The batch that waited becomes the one that computes.
void Pool::Impl::promote(Seat& seat) {
  if (!seat.first || !seat.first->published) return;
  auto& state = seat.first->header().state;
  uint32_t word = state.load();
  while (SlabState::of(word).phase == Phase::Held)
    if (state.compare_exchange_weak(word,
                                    SlabState{Phase::Open, SlabState::of(word).rows}.word())) {
      seat.first->at = clock_.now();
      seat.first->channel->to_worker().notify_all();
      return;
    }
}

void Pool::Impl::take_text(const Batch& batch, Outbox& outbox) {
  const auto& header = batch.header();
  if (!header.is_prompt || batch.entries.empty()) return;
  auto& ticket = *batch.entries[0].ticket;
  const size_t have = header.streamed.load();
  if (have <= ticket.text_seen || ticket.answered ||
      have > batch.channel->data_bytes() - header.inputs_end)
    return;
  const auto* text = reinterpret_cast<const char*>(batch.channel->slab(batch.slab).data);
  const std::string_view more(text + header.inputs_end + ticket.text_seen, have - ticket.text_seen);
  ticket.text_seen = have;
  ticket.answer.text += more;
  if (!ticket.on_text) return;
  ++ticket.texts;
  outbox.texts.push_back({batch.entries[0].ticket, ticket.on_text, std::string(more)});
}

// The outputs of some rows; the mutex is free meanwhile.
std::vector<std::string> Pool::Impl::copy_outputs(const Batch& batch, const Entry& entry) {
  const auto& slab = batch.channel->slab(batch.slab);
  const auto& header = *slab.header;
  std::vector<std::string> outputs;
  const auto* failed = slab.failed + entry.at;
  const bool some_failed = header.result == Result::SomeRowsFailed &&
                           std::any_of(failed, failed + entry.rows, [](uint8_t f) { return f; });
  if (header.result == Result::Failed || header.result == Result::TooMany || some_failed ||
      header.is_prompt)
    return outputs;
  for (uint32_t i = 0; i < std::min<uint32_t>(header.num_outputs, kMaxTensors); ++i) {
    const TensorPlace place = header.outputs[i];
    if (place.offset > batch.channel->data_bytes() ||
        place.bytes > batch.channel->data_bytes() - place.offset)
      fail(Kind::Internal, "a worker says that its output lies outside of its memory");
    std::string_view data(reinterpret_cast<const char*>(slab.data + place.offset), place.bytes);
    if (header.has_rows) {
      const size_t row = place.bytes / batch.rows, first = entry.at, count = size_t(entry.rows);
      int64_t each = 1;
      for (int32_t d = 1; d < place.rank; ++d) each *= place.shape[size_t(d)];
      data = Type(place.type) == Type::Bytes ? bytes_rows(data, size_t(each), first, count)
                                             : data.substr(first * row, count * row);
    }
    outputs.emplace_back(data);
  }
  return outputs;
}

// Some rows of a request are done; all of them: it is answered.
void Pool::Impl::take_rows(const Batch& batch, Entry& entry, std::vector<std::string> outputs,
                           Outbox& outbox) {
  auto& ticket = *entry.ticket;
  if (ticket.answered) return;
  const auto& slab = batch.channel->slab(batch.slab);
  const auto& header = *slab.header;
  const auto& facts = *batch.model->facts;
  for (int64_t i = 0; i < entry.rows; ++i)
    if (slab.owners_back[entry.at + i] != ticket.row_key + uint64_t(entry.from + i)) {
      outbox.lines.emplace_back([name = batch.model->config.name](const auto& log) {
        log.error("a row came back with another owner", {{"model", name}});
      });
      return answer(entry.ticket, {Status::Internal, "its rows came back in disorder"}, outbox);
    }
  if (header.result == Result::Invalid)
    return answer(entry.ticket,
                  {Status::Invalid,
                   cat("model '", batch.model->config.name, "': ", why_failed(batch, entry))},
                  outbox);
  if (header.result == Result::TooMany) {  // fewer of them at once
    entry.turn.tenant = -1;                // it has paid
    return requeue(entry);
  }
  const bool failed = header.result == Result::Failed || (!header.is_prompt && outputs.empty());
  if (failed && try_elsewhere(batch, entry)) return;
  if (ticket.doubts && ticket.doubts != batch.hosted) judge(ticket, !failed);
  if (failed)
    return answer(entry.ticket,
                  {Status::Internal, cat("model '", batch.model->config.name,
                                         "' failed: ", why_failed(batch, entry))},
                  outbox);
  auto& answer = ticket.answer;
  const bool first = ticket.pieces.empty();
  std::vector<Tensor> given;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& place = header.outputs[i];
    given.push_back({.name = i < facts.outputs.size()  ? facts.outputs[i].name
                             : header.num_outputs == 1 ? "y"
                                                       : cat("output", i),
                     .type = Type(place.type),
                     .shape = {place.shape.begin(), place.shape.begin() + place.rank}});
  }
  ticket.pieces[entry.from] = std::move(outputs);
  ticket.rows_done += entry.rows;
  if (first) {
    answer.timing.queue = std::max(Duration::zero(), time_of(header.sealed_at) - ticket.arrival);
    answer.timing.input = Duration(header.begun_at - header.sealed_at);
    answer.replica = batch.hosted->number;
    answer.batch = int(batch.rows);
    answer.outputs = std::move(given);
  } else if (!std::ranges::equal(answer.outputs, given, is_alike)) {
    return this->answer(entry.ticket,
                        {Status::Internal, cat("model '", batch.model->config.name,
                                               "' gave outputs of other types or shapes for a "
                                               "part of its rows than for the first ones")},
                        outbox);
  }
  answer.timing.compute += Duration(header.computed_at - header.begun_at);
  answer.timing.output += Duration(header.done_at - header.computed_at);
  if (ticket.rows_done < (header.has_rows ? ticket.rows : entry.rows)) return;
  for (size_t i = 0; i < answer.outputs.size(); ++i) {
    std::string whole;
    for (auto& [from, piece] : ticket.pieces)
      whole = whole.empty() ? std::move(piece[i]) : whole + piece[i];
    answer.holds.push_back(std::move(whole));
    if (header.has_rows) answer.outputs[i].shape[0] = ticket.rows;
  }
  for (size_t i = 0; i < answer.outputs.size(); ++i) answer.outputs[i].data = answer.holds[i];
  if (!ticket.request.outputs.empty()) {
    std::vector<Tensor> wanted;
    for (const auto& output : ticket.request.outputs)
      if (const auto found = std::ranges::find(answer.outputs, output.name, &Tensor::name);
          found != answer.outputs.end())
        wanted.push_back(*found);
    answer.outputs = std::move(wanted);
  }
  this->answer(entry.ticket, {}, outbox);
}

// What fails where much has failed may not be its own fault: another replica shows it.
bool Pool::Impl::try_elsewhere(const Batch& batch, Entry& entry) {
  auto& ticket = *entry.ticket;
  if (batch.header().result != Result::Failed || batch.hosted->failures < kFailsFast ||
      !batch.model->facts->pure || ticket.sequence || ticket.text_seen > 0 ||
      (ticket.doubts && ticket.doubts != batch.hosted) || !may_go_elsewhere(ticket, *batch.hosted))
    return false;
  ticket.doubts = batch.hosted;
  entry.turn.tenant = -1;  // it has paid
  requeue(entry);
  return true;
}

void Pool::Impl::judge(Ticket& ticket, bool works) {
  const auto doubted = std::exchange(ticket.doubts, nullptr);
  if (!works) {
    doubted->failures = doubted->guilt = 0;
    doubted->failed_for.clear();
  } else if (++doubted->guilt == kGuilty) {
    eject(*doubted, cat("it failed ", doubted->failures, " times in a row, and what of it was ",
                        "tried elsewhere worked"));
  }
}

void Pool::Impl::eject(Hosted& hosted, const std::string& why) {
  if (!hosted.worker) return;
  hosted.said = why;
  hosted.worker->kill();
  if (hosted.worker->pid() == 0) hosted.worker->stop();
}

// A worker runs what others wrote: numbers of its that cannot be are a failure.
void Pool::Impl::check_header(const Batch& batch) {
  auto& header = batch.header();
  header.error.back() = 0;
  bool sane = header.num_outputs <= kMaxTensors;
  for (uint32_t i = 0; sane && i < header.num_outputs; ++i) {
    const auto& place = header.outputs[i];
    sane = place.rank >= (header.has_rows ? 1 : 0) && place.rank <= kMaxRank && place.type >= 0 &&
           place.type <= int32_t(Type::Bytes);
  }
  if (!sane) header.set_error("its worker gave outputs that cannot be");
  if (!sane || (header.result == Result::TooMany && batch.capacity < 2))
    header.result = Result::Failed;
  if (header.result == Result::Failed || header.result == Result::TooMany) header.num_outputs = 0;
}

// Takes every batch that is done, hands its device the next one, and then its outputs.
void Pool::Impl::take_done(Outbox& outbox) {
  std::vector<BatchPtr> done;
  for (auto& seat : seats_) {
    while (seat.first && seat.first->published && !(seat.filling && seat.filled == seat.first)) {
      take_text(*seat.first, outbox);
      const auto state = SlabState::of(seat.first->header().state.load());
      if (state.phase != Phase::Done) break;
      done.push_back(seat.first);
      seat.first = std::exchange(seat.second, nullptr);
      promote(seat);
    }
  }
  if (done.empty()) return;
  try {
    if (queued_ > 0) pump();
  } catch (const std::exception&) {  // these are answered first; the last pump() says it again
  }
  for (const auto& batch : done) {
    size_t bytes = 0;
    auto& header = batch->header();
    check_header(*batch);
    for (uint32_t i = 0; i < header.num_outputs; ++i) bytes += header.outputs[i].bytes;
    std::vector<std::vector<std::string>> outputs(batch->entries.size());
    std::string broken;
    const auto copy = [&] {
      try {
        for (size_t i = 0; i < outputs.size(); ++i)
          outputs[i] = copy_outputs(*batch, batch->entries[i]);
      } catch (const std::exception& error) {
        broken = error.what();
      }
    };
    if (bytes >= kCopyUnlocked) mutex_.unlock();
    copy();
    if (bytes >= kCopyUnlocked) mutex_.lock();
    if (!broken.empty()) {
      header.set_error(broken);
      outbox.lines.emplace_back([broken, number = batch->hosted->number](const auto& log) {
        log.error(broken, {{"replica", number}});
      });
    }
    if (header.result == Result::Failed)  // in full, which the tenants of a mixed one do not get
      outbox.lines.emplace_back([why = std::string(header.error.data()),
                                 number = batch->hosted->number](const auto& log) {
        log.debug("a batch failed: " + why, {{"replica", number}});
      });
    try {
      account(*batch);
      for (size_t i = 0; i < outputs.size(); ++i)
        take_rows(*batch, batch->entries[i], std::move(outputs[i]), outbox);
    } catch (const std::exception& error) {  // as where memory is short
      for (const auto& entry : batch->entries)
        answer(entry.ticket,
               {Status::Internal, cat("its outputs could not be taken: ", error.what())}, outbox);
    }
    free_slab(*batch);
  }
  pump();  // though nobody waits, something may be staged behind a device that is slower
}

// The device's time is charged by rows, padding included.
void Pool::Impl::account(const Batch& batch) {
  const auto& header = batch.header();
  auto& model = *batch.model;
  auto& hosted = *batch.hosted;
  const Duration time(std::max<int64_t>(header.done_at - header.sealed_at, 0));
  const double rows = double(std::max<uint32_t>(batch.rows, 1));
  for (const auto& entry : batch.entries) {
    const Duration part(int64_t(double(time.count()) * double(entry.rows) / rows));
    auto& tenant = *tenants_[size_t(entry.ticket->tenant)];
    const double part_s = std::chrono::duration<double>(part).count();
    if (entry.turn.tenant >= 0) share_.finish(entry.turn, part);
    tenant.device_s->add(part_s);
    if (entry.turn.borrows) tenant.borrowed_s->add(part_s);
    tenant.usage[model.config.name].device_s += part_s;
  }
  hosted.busy += time;
  trace_.add({hosted.number, batch.rows, header.sealed_at, header.begun_at, header.computed_at,
              header.done_at, header.copy_in, header.copy_out, header.copies});
  ++hosted.batches;
  hosted.rows += batch.rows;
  ++model.stats.batches;
  model.batches->add();
  model.batch_rows->observe(double(batch.rows));
  auto& by_rows = model.stats.by_rows[batch.rows];
  by_rows.input.add(Duration(header.begun_at - header.sealed_at));
  by_rows.compute.add(Duration(header.computed_at - header.begun_at));
  by_rows.output.add(Duration(header.done_at - header.computed_at));
  if (header.result == Result::TooMany) return learn(batch, time);
  if (header.result == Result::Failed) {
    ++hosted.failures;
    for (const auto& entry : batch.entries) hosted.failed_for.insert(entry.ticket->tenant);
    const int many = hosted.failed_for.size() > 1 ? kFailsFast : kFailsForOne;
    const bool others_work = std::ranges::any_of(model.hosted, [&](const auto& other) {
      return other.get() != &hosted && other->state == Hosted::State::Ready &&
             other->failures == 0 && other->batches > 0;
    });
    if (!model.facts->pure && hosted.failures >= many && others_work)
      eject(hosted, cat("it failed ", hosted.failures,
                        " times in a row, as others did not: ", header.error.data()));
    return;
  }
  hosted.failures = hosted.guilt = 0;
  hosted.failed_for.clear();
  if (clock_.now() - hosted.since > kQuick) hosted.quick_deaths = 0;
  model.row_ns += 0.1 * (double(time.count()) / rows - model.row_ns);
  learn(batch, time);
}

// What batches of its shape take.
void Pool::Impl::learn(const Batch& batch, Duration time) {
  auto& known = batch.model->seen;
  const auto& header = batch.header();
  const auto& key = batch.model->seen_as(batch.shape_key);
  if (known.size() >= kMostShapes && !known.contains(key)) {
    if (header.result != Result::TooMany) return;
    known.erase(std::prev(known.end()));
  }
  auto& seen = known[key];
  if (header.result == Result::TooMany) {
    seen.fit = std::min(seen.fit, std::clamp<uint32_t>(header.fits, 1, batch.capacity - 1));
    return;
  }
  const double rows = double(std::max<uint32_t>(batch.rows, 1));
  const auto keep_longest = [](double& longest, double ns) {
    longest = std::max(ns, longest + kForget * (ns - longest));
  };
  keep_longest(seen.batch_ns, double(time.count()));
  keep_longest(seen.row_ns, double(time.count()) / rows);
  uint64_t out = header.is_prompt ? header.streamed.load() : 0;
  for (uint32_t i = 0; i < header.num_outputs; ++i) out += header.outputs[i].bytes;
  seen.out = std::max(seen.out, out / uint64_t(rows));
}

void Pool::Impl::free_slab(const Batch& batch) {
  if (batch.lost) return;
  auto& header = batch.header();
  const auto& slab = batch.channel->slab(batch.slab);
  const uint64_t end =
      std::min(std::max(header.inputs_end, header.outputs_end), batch.channel->data_bytes());
  if (options_.poison) {
    std::memset(slab.data, 0xdb, end);
    std::memset(slab.owners_back, 0xdb, batch.rows * sizeof(uint64_t));
  }
  if (end > kLarge) batch.channel->forget(batch.slab);
  header.num_outputs = 0;
  header.outputs_end = 0;
  header.state.store(SlabState{}.word());
  if (batch.hosted->worker && batch.hosted->worker->shared_channel() == batch.channel)
    batch.hosted->used[size_t(batch.slab)] = false;
}

}  // namespace yoke::serve
