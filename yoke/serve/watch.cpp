// SPDX-License-Identifier: Apache-2.0
// What workers say, batches that are done, workers that end or hang, and time.
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/serve/pool_impl.h"

namespace yoke::serve {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Batches in a row that failed while others' did not: of several tenants, or of one, whose own
// fault it may be.
constexpr int kFailsFast = 8, kFailsForOne = 32;
constexpr Duration kQuick = seconds(5);     // a worker that ends sooner was not healthy
constexpr Duration kUnknown = seconds(60);  // that a batch of a shape nobody has seen may take
constexpr uint64_t kLarge = 64 << 20;       // bytes of a slab that are given back

Time time_of(int64_t ns) { return Time(Duration(ns)); }

// How long a worker waits before it is started again.
Duration back_off(int quick_deaths) {
  return quick_deaths <= 1 ? Duration::zero()
                           : milliseconds(100) * (1 << std::min(quick_deaths, 8));
}

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

}  // namespace

Pool::Impl::~Impl() = default;

void Pool::Impl::wake() {
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof(one)) < 0) return;  // full: it is awake already
}

void Pool::Impl::listen(int file, uint64_t what) const {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = what}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, file, &event) != 0)
    fail(Kind::Io, "cannot watch a worker: ", std::strerror(errno));
}

void Pool::Impl::start(Hosted& hosted) {
  hosted.since = clock_.now();
  hosted.state = Hosted::State::Starting;
  hosted.next_slab = 0;
  hosted.used = {};
  hosted.failures = 0;
  hosted.said.clear();
  const auto rows = std::clamp<int64_t>(hosted.spec.batch, 1024, kMaxRows);
  hosted.worker =
      std::make_unique<Replica>(options_.workers, hosted.spec, uint32_t(rows), options_.slab_bytes);
  listen(hosted.worker->line(), uint64_t(hosted.number) << 1 | 1);
  listen(hosted.worker->done_event(), uint64_t(hosted.number) << 1);
}

// The worker is let go: it ends by itself or is killed, and is reaped when it has.
void Pool::Impl::dismiss(Hosted& hosted) {
  if (!hosted.worker) return;
  for (const int file : {hosted.worker->line(), hosted.worker->done_event()})
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, file, nullptr);
  hosted.worker->stop();
  leaving_.emplace_back(clock_.now(), std::move(hosted.worker));
}

// No request finds it any more; those that it has are finished.
void Pool::Impl::retire(std::shared_ptr<Model> model) {  // not a reference into models_
  model->state = ModelState::Unloading;
  models_.erase(model->key());
  going_.push_back(std::move(model));
}

void Pool::Impl::became_ready(Hosted& hosted, const std::string& json) {
  auto facts = std::make_shared<Facts>(parse_facts(json));
  facts->batch = std::clamp<int64_t>(facts->batch, 0, hosted.worker->channel().max_rows());
  auto model = hosted.model;
  if (model->facts &&
      (facts->inputs != model->facts->inputs || facts->batch != model->facts->batch))
    fail(Kind::Config, "'", model->config.path, "' is another model than before; load it anew");
  hosted.state = Hosted::State::Ready;
  hosted.since = clock_.now();
  if (!model->facts) {
    for (const auto& note : facts->notes) log_.info(cat(model->config.name, ": ", note));
    const bool one_shape = std::ranges::all_of(facts->inputs, [](const auto& port) {
      return std::ranges::all_of(port.shape.begin() + (port.has_rows() ? 1 : 0), port.shape.end(),
                                 &plan::Size::fixed);
    });
    model->one_shape = facts->declared && one_shape && !facts->has_words;
    model->longest[""].batch = facts->longest_s * 1e9;
    if (facts->longest_s > 0 && facts->batch > 0)
      model->row_ns = facts->longest_s * 1e9 / double(facts->batch);
    model->facts = std::move(facts);
  }
  log_.debug("a replica is ready", {{"model", model->config.name},
                                    {"replica", hosted.number},
                                    {"device", hosted.seat->name},
                                    {"pid", hosted.worker->pid()}});
  const auto is_ready = [](const auto& one) { return one->state == Hosted::State::Ready; };
  const auto coming = std::ranges::find(coming_, model);
  if (coming != coming_.end()) {
    if (std::ranges::all_of(model->hosted, is_ready)) {
      coming_.erase(coming);
      if (const auto old = models_.find(model->key()); old != models_.end()) retire(old->second);
      models_[model->key()] = model;
      model->state = ModelState::Ready;
    }
  } else if (model->state == ModelState::Unavailable) {
    model->state = ModelState::Ready;
    model->reason.clear();
  }
  model->given_up = false;
  count_devices();
  changed_.notify_all();
}

// What happens to rows in a worker that ended: those it had not begun wait again; the others were
// perhaps what killed it, so each is tried once more, alone.
void Pool::Impl::give_back(Seat& seat, BatchPtr& batch, Outbox& outbox) {
  batch->lost = true;
  const bool begun =
      batch->published && SlabState::of(batch->header().state.load()).phase == Phase::Sealed;
  for (const auto& entry : batch->entries)
    if (begun && entry.ticket->alone)
      answer(entry.ticket,
             {Status::Internal, "the worker that computed it ended, twice; it was not tried again"},
             outbox);
  for (auto entry = batch->entries.rbegin(); entry != batch->entries.rend(); ++entry) {
    const auto ticket = entry->ticket;
    ticket->alone |= begun;
    if (ticket->sticky)
      answer(ticket, {Status::Internal, "the worker that had its sequence ended; begin it anew"},
             outbox);
    requeue(*entry);
  }
  batch->entries.clear();
  if (&batch == &seat.first)
    seat.first = std::exchange(seat.second, nullptr);
  else
    batch = nullptr;
}

void Pool::Impl::died(Hosted& hosted, const std::string& why, Outbox& outbox) {
  const Time now = clock_.now();
  auto& seat = *hosted.seat;
  const bool was_ready = hosted.state == Hosted::State::Ready;
  const bool quick = !was_ready || now - hosted.since < kQuick;
  hosted.state = Hosted::State::Dead;
  hosted.quick_deaths = quick ? hosted.quick_deaths + 1 : 1;
  // What it finished before is kept aside until now, so the rest was lost with it.
  if (seat.second && seat.second->hosted == &hosted) give_back(seat, seat.second, outbox);
  if (seat.first && seat.first->hosted == &hosted) give_back(seat, seat.first, outbox);
  promote(seat);
  dismiss(hosted);
  auto& model = *hosted.model;
  std::erase_if(model.sequences, [&](const auto& entry) { return entry.second == &hosted; });
  hosted.sequences = 0;
  if (model.state == ModelState::Unloading && model.in_flight == 0) return;
  if (std::ranges::count(coming_, hosted.model) == 0)  // else whoever loads it is told
    log_.warning(cat("a worker of '", model.config.name, "' ended: ", why),
                 {{"replica", hosted.number}, {"device", seat.name}});
  const bool coming = std::ranges::count(coming_, hosted.model) > 0;
  if (coming && (!hosted.said.empty() || hosted.quick_deaths >= 3)) {
    model.state = ModelState::Unavailable;  // whoever waits for it takes it away
    model.reason = why;
    changed_.notify_all();
    return;
  }
  ++hosted.restarts;
  hosted.start_at = now + back_off(hosted.quick_deaths);
  count_devices();
  const bool some = std::ranges::any_of(model.hosted, [](const auto& one) {
    return one->state == Hosted::State::Ready || one->quick_deaths < kGivenUp;
  });
  if (std::ranges::none_of(model.hosted,
                           [](const auto& one) { return one->state == Hosted::State::Ready; }) &&
      !coming && model.state != ModelState::Unloading) {
    model.state = ModelState::Unavailable;
    model.reason = why;
  }
  if (some || coming) return;
  model.given_up = true;
  std::vector<TicketPtr> waiting;
  for (const auto& tenant : tenants_)
    if (const auto queue = tenant->queues.find(&model); queue != tenant->queues.end())
      for (const auto& [key, ticket] : queue->second) waiting.push_back(ticket);
  for (const auto& ticket : waiting) answer(ticket, unhealthy(model), outbox);
}

Outcome Pool::Impl::unhealthy(const Model& model) const {
  return {Status::Unavailable,
          cat("model '", model.config.name, "' has no healthy replica: ", model.reason), 5};
}

void Pool::Impl::heard(Hosted& hosted, Outbox& outbox) {
  while (hosted.worker) {
    const auto message = receive_message(hosted.worker->line(), {});
    if (!message) return;
    if (message->text.empty()) {
      take_done(outbox);
      if (!hosted.worker) return;
      const std::string why = hosted.said.empty() ? hosted.worker->how_it_ended() : hosted.said;
      died(hosted, why, outbox);
    } else if (message->text.starts_with("ready ")) {
      try {
        became_ready(hosted, message->text.substr(6));
      } catch (const std::exception& error) {
        hosted.said = error.what();
        hosted.worker->kill();
        hosted.worker->stop();
      }
    } else if (message->text.starts_with("failed ")) {
      hosted.said = message->text.substr(7);
    }
  }
}

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
  if (ticket.on_text) outbox.texts.emplace_back(ticket.on_text, more);
}

// The outputs of some rows; the mutex is free meanwhile.
std::vector<std::string> Pool::Impl::copy_outputs(const Batch& batch, const Entry& entry) {
  const auto& slab = batch.channel->slab(batch.slab);
  const auto& header = *slab.header;
  std::vector<std::string> outputs;
  const auto* failed = slab.failed + entry.at;
  const bool some_failed = header.result == Result::SomeRowsFailed &&
                           std::any_of(failed, failed + entry.rows, [](uint8_t f) { return f; });
  if (header.result == Result::Failed || some_failed || header.is_prompt) return outputs;
  for (uint32_t i = 0; i < std::min<uint32_t>(header.num_outputs, kMaxTensors); ++i) {
    const auto& place = header.outputs[i];
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
      log_.error("a row came back with another owner", {{"model", batch.model->config.name}});
      return answer(entry.ticket, {Status::Internal, "its rows came back in disorder"}, outbox);
    }
  if (header.result == Result::Failed || (!header.is_prompt && outputs.empty()))
    return answer(entry.ticket,
                  {Status::Internal,
                   cat("model '", batch.model->config.name, "' failed: ", header.error.data())},
                  outbox);
  auto& answer = ticket.answer;
  const bool first = ticket.pieces.empty();
  ticket.pieces[entry.from] = std::move(outputs);
  ticket.rows_done += entry.rows;
  if (first) {
    answer.timing.queue = std::max(Duration::zero(), time_of(header.sealed_at) - ticket.arrival);
    answer.timing.input = Duration(header.begun_at - header.sealed_at);
    answer.replica = batch.hosted->number;
    answer.batch = int(batch.rows);
    for (uint32_t i = 0; i < header.num_outputs; ++i) {
      const auto& place = header.outputs[i];
      answer.outputs.push_back(
          {.name = i < facts.outputs.size() ? facts.outputs[i].name : cat("output", i),
           .type = Type(place.type),
           .shape = {place.shape.begin(), place.shape.begin() + place.rank}});
    }
  }
  answer.timing.compute += Duration(header.computed_at - header.begun_at);
  answer.timing.output += Duration(header.done_at - header.computed_at);
  if (ticket.rows_done < (header.has_rows ? ticket.rows : entry.rows)) return;
  for (size_t i = 0; i < answer.outputs.size(); ++i) {
    std::string whole;
    for (auto& [from, piece] : ticket.pieces) {
      if (i >= piece.size())
        return this->answer(entry.ticket, {Status::Internal, "its rows have different outputs"},
                            outbox);
      whole = whole.empty() ? std::move(piece[i]) : whole + piece[i];
    }
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

// A worker runs what others wrote: numbers of its that cannot be are a failure.
void Pool::Impl::check_header(SlabHeader& header) {
  header.error.back() = 0;
  bool sane = header.num_outputs <= kMaxTensors;
  for (uint32_t i = 0; sane && i < header.num_outputs; ++i) {
    const auto& place = header.outputs[i];
    sane = place.rank >= (header.has_rows ? 1 : 0) && place.rank <= kMaxRank && place.type >= 0 &&
           place.type <= int32_t(Type::Bytes);
  }
  if (sane) return;
  header.num_outputs = 0;
  header.result = Result::Failed;
  header.set_error("its worker gave outputs that cannot be");
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
  if (queued_ > 0) pump();
  for (const auto& batch : done) {
    size_t bytes = 0;
    auto& header = batch->header();
    check_header(header);
    for (uint32_t i = 0; i < header.num_outputs; ++i) bytes += header.outputs[i].bytes;
    std::vector<std::vector<std::string>> outputs(batch->entries.size());
    std::string broken;
    const auto copy = [&] {
      try {
        for (size_t i = 0; i < outputs.size(); ++i)
          outputs[i] = copy_outputs(*batch, batch->entries[i]);
      } catch (const Error& error) {
        broken = error.what();
      }
    };
    if (bytes >= kCopyUnlocked) mutex_.unlock();
    copy();
    if (bytes >= kCopyUnlocked) mutex_.lock();
    if (!broken.empty()) log_.error(broken, {{"replica", batch->hosted->number}});
    account(*batch);
    for (size_t i = 0; i < outputs.size(); ++i)
      take_rows(*batch, batch->entries[i], std::move(outputs[i]), outbox);
    free_slab(*batch);
  }
  if (queued_ > 0) pump();
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
              header.done_at});
  ++hosted.batches;
  hosted.rows += batch.rows;
  ++model.stats.batches;
  model.batches->add();
  model.batch_rows->observe(double(batch.rows));
  auto& by_rows = model.stats.by_rows[batch.rows];
  by_rows.input.add(Duration(header.begun_at - header.sealed_at));
  by_rows.compute.add(Duration(header.computed_at - header.begun_at));
  by_rows.output.add(Duration(header.done_at - header.computed_at));
  if (header.result == Result::Failed) {
    ++hosted.failures;
    for (const auto& entry : batch.entries) hosted.failed_for.insert(entry.ticket->tenant);
    const int many = hosted.failed_for.size() > 1 ? kFailsFast : kFailsForOne;
    const bool others_work = std::ranges::any_of(model.hosted, [&](const auto& other) {
      return other.get() != &hosted && other->state == Hosted::State::Ready &&
             other->failures == 0 && other->batches > 0;
    });
    if (hosted.failures >= many && others_work && hosted.worker) {
      hosted.said = cat("it failed ", hosted.failures,
                        " times in a row, as others did not: ", header.error.data());
      hosted.worker->kill();
      if (hosted.worker->pid() == 0) hosted.worker->stop();
    }
    return;
  }
  hosted.failures = 0;
  hosted.failed_for.clear();
  if (clock_.now() - hosted.since > kQuick) hosted.quick_deaths = 0;
  model.row_ns += 0.1 * (double(time.count()) / rows - model.row_ns);
  if (model.longest.size() < 256 || model.longest.contains(batch.shape_key)) {
    auto& longest = model.longest[model.one_shape ? "" : batch.shape_key];
    longest.batch = std::max(longest.batch, double(time.count()));
    longest.row = std::max(longest.row, double(time.count()) / rows);
  }
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

void Pool::Impl::count_devices() {
  int count = 0;
  for (const auto& seat : seats_)
    count += seat.owner < 0 && std::ranges::any_of(seat.hosted, [](const Hosted* hosted) {
               return hosted->state == Hosted::State::Ready;
             });
  share_.set_devices(std::max(count, 1));
}

// When a worker that has begun, or should have, is taken for stuck.
Time Pool::Impl::stuck_at(Batch& batch) const {
  const uint64_t progress = batch.channel->progress().load();
  const auto& header = batch.header();
  const bool sealed = SlabState::of(header.state.load()).phase == Phase::Sealed;
  if (progress != batch.progress || sealed != batch.sealed) {
    batch.progress = progress;
    batch.sealed = sealed;
    batch.progress_at = clock_.now();
  }
  const auto& longest = batch.model->longest;
  const auto known = longest.find(batch.model->one_shape ? "" : batch.shape_key);
  Duration four = sealed ? kUnknown : Duration::zero();
  if (known != longest.end() && known->second.batch > 0)
    four = Duration(int64_t(4 * std::max(known->second.batch, known->second.row * batch.rows)));
  return std::max(batch.at, batch.progress_at) + std::max(options_.stuck_floor, four);
}

Time Pool::Impl::look_around(Outbox& outbox) {
  const Time now = clock_.now();
  Time next = now + seconds(1);
  const auto at = [&](Time time) { next = std::min(next, time); };
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto ticket = deadlines_.begin()->second;
    const auto timeout = ticket->request.parameters.timeout;
    answer(ticket,
           {Status::Deadline, cat("no answer within its timeout of ", duration_text(timeout))},
           outbox);
  }
  if (!deadlines_.empty()) at(deadlines_.begin()->first);
  for (auto* hosted : std::vector(all_hosted_)) {
    const bool waits =
        hosted->state == Hosted::State::Dead && !hosted->worker &&
        !(hosted->model->state == ModelState::Unloading && hosted->model->in_flight == 0) &&
        !(hosted->model->state == ModelState::Unavailable && !hosted->said.empty() &&
          std::ranges::count(coming_, hosted->model) > 0);
    if (waits && hosted->start_at <= now) {
      try {
        start(*hosted);
      } catch (const std::exception& error) {
        hosted->said = error.what();
        died(*hosted, hosted->said, outbox);
      }
    } else if (waits) {
      at(hosted->start_at);
    }
    if (hosted->state == Hosted::State::Starting) {
      const Time late = hosted->since + options_.start_timeout;
      if (late <= now) {
        hosted->said = cat("it was not ready within ", duration_text(options_.start_timeout));
        hosted->worker->kill();
        died(*hosted, hosted->said, outbox);
      }
      at(std::max(late, now));
    }
  }
  for (auto& seat : seats_) {
    if (!seat.first || !seat.first->published || seat.first->hosted->worker == nullptr) continue;
    const Time stuck = stuck_at(*seat.first);
    at(stuck);
    if (stuck > now) continue;
    auto& hosted = *seat.first->hosted;
    const std::string why = cat("it was stuck for ", duration_text(now - seat.first->progress_at));
    hosted.worker->kill();
    died(hosted, why, outbox);
  }
  std::erase_if(going_, [&](const auto& model) {
    const bool busy = model->in_flight > 0 || std::ranges::any_of(seats_, [&](const Seat& seat) {
                        return seat.filling || (seat.first && seat.first->model == model) ||
                               (seat.second && seat.second->model == model);
                      });
    if (busy) return at(now + milliseconds(20)), false;
    for (const auto& hosted : model->hosted) {
      dismiss(*hosted);
      metrics_
          .gauge("yoke_replica_ready", "",
                 {{"replica", std::to_string(hosted->number)},
                  {"model", model->config.name},
                  {"device", hosted->seat->name}})
          .set(0);
      std::erase(hosted->seat->hosted, hosted.get());
      std::erase(all_hosted_, hosted.get());
    }
    graveyard_.push_back(std::move(model->hosted));  // batches of others may still name them
    count_devices();
    changed_.notify_all();
    return true;
  });
  std::erase_if(leaving_, [&](auto& leaving) {
    if (now - leaving.first > milliseconds(500)) leaving.second->kill();
    return leaving.second->reap();
  });
  if (!leaving_.empty()) at(now + milliseconds(5));
  return next;
}

void Pool::Impl::watch_once(int timeout_ms) {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), int(events.size()), timeout_ms);
  Outbox outbox;
  {
    const MutexLock lock(mutex_);
    bool woken = false;
    for (int i = 0; i < count; ++i) {
      const uint64_t what = events[size_t(i)].data.u64;
      uint64_t number = 0;
      if (what == kWake || what == kTimer) {
        const int file = what == kWake ? wake_.get() : timer_.get();
        woken |= ::read(file, &number, sizeof(number)) > 0;
        continue;
      }
      const auto found =
          std::ranges::find(all_hosted_, int(what >> 1), [](auto* one) { return one->number; });
      if (found == all_hosted_.end() || !(*found)->worker) continue;
      if (what & 1) {
        heard(**found, outbox);
        woken = true;  // a worker came or went
      } else if (::read((*found)->worker->done_event(), &number, sizeof(number)) < 0) {
        continue;
      }
    }
    take_done(outbox);
    if (woken) {
      timer_at_ = Time::max();
      const Time next = look_around(outbox);
      if (queued_ > 0) pump();
      look_by(next);
    }
  }
  send(outbox);
}

void Pool::Impl::look_by(Time time) {
  if (time >= timer_at_) return;
  timer_at_ = time;
  const int64_t left = std::max<int64_t>((time - clock_.now()).count(), 1000);
  const itimerspec spec{
      .it_interval = {},
      .it_value = {.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000}};
  ::timerfd_settime(timer_.get(), 0, &spec, nullptr);
}

}  // namespace yoke::serve
