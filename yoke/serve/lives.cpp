// SPDX-License-Identifier: Apache-2.0
// Workers that start, become ready, end and are started again.
#include <sys/epoll.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/serve/pool_impl.h"

namespace yoke::serve {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMostParts = 16 << 20;  // bytes of what a worker tells of its parts

// How long a worker waits before it is started again.
Duration back_off(int quick_deaths) {
  return quick_deaths <= 1 ? Duration::zero()
                           : milliseconds(100) * (1 << std::min(quick_deaths, 8));
}

// A slab has places for no more.
void check_tensors(const std::vector<Port>& ports, const char* what) {
  if (ports.size() > kMaxTensors)
    fail(Kind::Config, "the model has ", ports.size(), " ", what, ", wanted at most ", kMaxTensors,
         "; join some of them in the model");
  for (const auto& port : ports)
    if (port.shape.size() > kMaxRank)
      fail(Kind::Config, "the model's '", port.name, "' has ", port.shape.size(),
           " dimensions, wanted at most ", kMaxRank);
}

// As far as they say it.
uint64_t row_bytes(const std::vector<Port>& ports) {
  uint64_t sum = 0;
  for (const auto& port : ports) {
    uint64_t bytes = plan::size_of(port.type);
    for (size_t i = port.has_rows() ? 1 : 0; i < port.shape.size(); ++i)
      bytes *= port.shape[i].fixed() ? uint64_t(port.shape[i].most) : 0;
    sum += bytes;
  }
  return sum;
}

}  // namespace

void Pool::Impl::start(Hosted& hosted) {
  hosted.since = clock_.now();
  hosted.state = Hosted::State::Starting;
  hosted.next_slab = 0;
  hosted.used = {};
  hosted.failures = hosted.guilt = 0;
  hosted.said.clear();
  hosted.more_parts.clear();
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

void Pool::Impl::became_ready(Hosted& hosted, const std::string& json, Outbox& outbox) {
  auto facts = std::make_shared<Facts>(parse_facts(json));
  facts->batch = std::clamp<int64_t>(facts->batch, 0, hosted.worker->channel().max_rows());
  check_tensors(facts->inputs, "inputs");
  check_tensors(facts->outputs, "outputs");
  auto model = hosted.model;
  if (model->facts &&
      (facts->inputs != model->facts->inputs || facts->batch != model->facts->batch))
    fail(Kind::Config, "'", model->config.path, "' is another model than before; load it anew");
  hosted.state = Hosted::State::Ready;
  hosted.since = clock_.now();
  if (!model->facts) {
    for (const auto& note : facts->notes)
      outbox.lines.emplace_back(
          [text = cat(model->config.name, ": ", note)](const auto& log) { log.info(text); });
    const bool whole =
        facts->batch == 0 || std::ranges::count(facts->inputs, Type::Bytes, &Port::type) > 0;
    const bool one_shape = std::ranges::all_of(facts->inputs, [&](const auto& port) {
      return std::ranges::all_of(port.shape.begin() + (!whole && port.has_rows() ? 1 : 0),
                                 port.shape.end(), &plan::Size::fixed);
    });
    model->one_shape = facts->declared && one_shape && !facts->has_words;
    model->seen[""] = {.batch_ns = facts->longest_s * 1e9, .out = row_bytes(facts->outputs)};
    if (facts->longest_s > 0 && facts->batch > 0)
      model->row_ns = facts->longest_s * 1e9 / double(facts->batch);
    model->facts = std::move(facts);
  }
  outbox.lines.emplace_back([model, number = hosted.number, device = hosted.seat->name,
                             pid = hosted.worker->pid()](const auto& log) {
    log.debug(
        "a replica is ready",
        {{"model", model->config.name}, {"replica", number}, {"device", device}, {"pid", pid}});
  });
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
// perhaps what killed it, so each is tried once more, alone. Not where the model is impure: it
// may have kept something of what it did.
void Pool::Impl::give_back(Seat& seat, BatchPtr& batch, Outbox& outbox) {
  batch->lost = true;
  const bool begun =
      batch->published && SlabState::of(batch->header().state.load()).phase == Phase::Sealed;
  const bool pure = batch->model->facts->pure;
  for (const auto& entry : batch->entries)
    if (begun && !entry.ticket->sequence && (entry.ticket->alone || !pure))
      answer(entry.ticket,
             {Status::Internal,
              cat("the worker that computed it ended",
                  pure ? ", twice; it was not tried again"
                       : cat("; it was not tried again, as model '", batch->model->config.name,
                             "' may write its own state or mix rows"))},
             outbox);
  for (auto entry = batch->entries.rbegin(); entry != batch->entries.rend(); ++entry) {
    const auto ticket = entry->ticket;
    ticket->alone |= begun;
    if (ticket->sequence)
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
  if (seat.second && seat.second->hosted.get() == &hosted) give_back(seat, seat.second, outbox);
  if (seat.first && seat.first->hosted.get() == &hosted) give_back(seat, seat.first, outbox);
  promote(seat);
  dismiss(hosted);
  auto& model = *hosted.model;
  std::erase_if(model.sequences, [&](const auto& entry) {
    if (entry.second->hosted != &hosted) return false;
    model.leave(*entry.second);
    return true;
  });
  if (model.state == ModelState::Unloading && model.in_flight == 0) return;
  if (std::ranges::count(coming_, hosted.model) == 0)  // else whoever loads it is told
    outbox.lines.emplace_back([text = cat("a worker of '", model.config.name, "' ended: ", why),
                               number = hosted.number, device = seat.name](const auto& log) {
      log.warning(text, {{"replica", number}, {"device", device}});
    });
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
          cat("model '", model.config.name, "' has no healthy replica: ", model.reason)};
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
        became_ready(hosted, message->text.substr(6), outbox);
      } catch (const std::exception& error) {
        hosted.said = error.what();
        hosted.worker->kill();
        hosted.worker->stop();
      }
    } else if (message->text.starts_with("parts ")) {
      hosted.parts = std::exchange(hosted.more_parts, "") + message->text.substr(6);
    } else if (message->text.starts_with("part ")) {
      if (hosted.more_parts.size() < kMostParts) hosted.more_parts += message->text.substr(5);
    } else if (message->text.starts_with("failed ")) {
      hosted.said = message->text.substr(7);
    }
  }
}

void Pool::Impl::count_devices() {
  int count = 0;
  for (const auto& seat : seats_) count += seat.is_shared();
  share_.set_devices(std::max(count, 1));
}

}  // namespace yoke::serve
