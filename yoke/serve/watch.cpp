// SPDX-License-Identifier: Apache-2.0
// What wakes the pool: workers, those who ask, and time. Batches that hang, models that are gone.
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

constexpr Duration kUnknown = seconds(60);  // that a batch of a shape nobody has seen may take
constexpr Duration kUntaken = seconds(2);   // that a batch lies open for a worker that is well
constexpr Duration kLookForIdle = milliseconds(100);  // at sequences, at the most

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
  const auto known = batch.model->seen.find(batch.model->seen_as(batch.shape_key));
  Duration four = sealed ? kUnknown : Duration::zero();
  if (known != batch.model->seen.end() && known->second.batch_ns > 0)
    four =
        Duration(int64_t(4 * std::max(known->second.batch_ns, known->second.row_ns * batch.rows)));
  // How long a prompt is says no shape.
  if (sealed && header.is_prompt) four = std::max(four, kUnknown);
  const Duration floor = sealed ? options_.stuck_floor : std::min(options_.stuck_floor, kUntaken);
  return std::max(batch.at, batch.progress_at) + std::max(floor, four);
}

// A client that went away without sequence_end must not keep its place for ever.
void Pool::Impl::forget_idle_sequences(Time now) {
  if (now < sequences_at_) return;
  sequences_at_ = now + kLookForIdle;
  for (const auto& model : with_sequences()) {
    double idle_s = model->config.sequence_idle_s;
    if (idle_s == 0 && model->state == ModelState::Unloading)  // it does not stay for ever
      idle_s = ModelConfig{}.sequence_idle_s;
    const Duration idle(int64_t(idle_s * 1e9));
    if (idle == Duration::zero()) continue;
    std::erase_if(model->sequences, [&](const auto& entry) {
      const auto& sequence = *entry.second;
      if (sequence.in_flight > 0 || now - sequence.used <= idle) return false;
      model->leave(sequence);
      return true;
    });
  }
}

Time Pool::Impl::look_around(Outbox& outbox) {
  const Time now = clock_.now();
  forget_idle_sequences(now);
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
    const Time since = std::max(seat.first->at, seat.first->progress_at);
    const std::string why = cat("it was stuck for ", duration_text(now - since));
    hosted.worker->kill();
    died(hosted, why, outbox);
  }
  std::erase_if(going_, [&](const auto& model) {
    const bool replaced = models_.contains(model->key());
    const bool busy = model->in_flight > 0 || (replaced && !model->sequences.empty()) ||
                      std::ranges::any_of(seats_, [&](const Seat& seat) {
                        return seat.filling || (seat.first && seat.first->model == model) ||
                               (seat.second && seat.second->model == model);
                      });
    if (busy) return at(now + milliseconds(20)), false;
    for (const auto& hosted : model->hosted) {
      dismiss(*hosted);
      metrics_.remove(labels_of(*hosted));
      std::erase(hosted->seat->hosted, hosted.get());
      std::erase(all_hosted_, hosted.get());
    }
    model->hosted.clear();
    model->pending->set(0);
    std::erase_if(seats_, [](const Seat& seat) { return seat.hosted.empty(); });
    set_owners();  // and counts what is left
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
  try {
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
      pump();
      look_by(next);
    }
  } catch (const std::exception& error) {  // as where memory is short for a moment
    log_.error(cat("the pool goes on after: ", error.what()));
    const MutexLock lock(mutex_);
    timer_at_ = Time::max();
    look_by(clock_.now() + milliseconds(10));
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
