// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/pool.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/serve/check.h"
#include "yoke/serve/pool_impl.h"
#include "yoke/topo/device.h"
#include "yoke/topo/host.h"

namespace yoke::serve {
namespace {

constexpr uint64_t kUsualPriority = 1 << 20;  // what 0 means: below all that are given
constexpr size_t kMostSequences = 1024;       // of a replica
constexpr double kRetryAfter = 5;             // seconds, where nobody knows

// Without the number of rows, where batches have those of several requests.
std::string shape_key(const Request& request, const Facts& facts) {
  const size_t first = is_whole(request, facts) ? 0 : 1;
  std::string key;
  for (const auto& input : request.inputs) {
    key += char(input.type);
    for (size_t i = first; i < input.shape.size(); ++i)
      key += std::to_string(input.shape[i]) += ',';
  }
  return key;
}

}  // namespace

Pool::Impl::Impl(const PoolOptions& options, observe::Log log, observe::Registry& metrics)
    : options_(options), log_(std::move(log)), metrics_(metrics), trace_(options.trace) {
  std::random_device random;
  next_row_key_ = uint64_t(random()) << 32 | random();  // one pool's rows are not another's
  epoll_ = net::Descriptor(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = net::Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  timer_ = net::Descriptor(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!epoll_ || !wake_ || !timer_) fail(Kind::Io, "cannot watch workers: ", std::strerror(errno));
  listen(wake_.get(), kWake);
  listen(timer_.get(), kTimer);
  wake();
}

void Pool::Impl::count_in(Ticket& ticket) {
  auto& tenant = *tenants_[size_t(ticket.tenant)];
  ticket.counted = true;
  ++waiting_;
  ++tenant.waiting;
  tenant.waiting_bytes += ticket.bytes;
}

// Before its answer leaves: whoever then asks for the next thing finds room for it.
void Pool::Impl::count_out(Ticket& ticket) {
  if (!ticket.counted) return;
  auto& tenant = *tenants_[size_t(ticket.tenant)];
  const auto count_out = [&tenant, bytes = ticket.bytes] {
    --tenant.waiting;
    tenant.waiting_bytes -= bytes;
  };
  if (!ticket.request.may_be_held) return count_out();
  ticket.answer.place = {&tenant, [this, count_out](const void*) {
                           const MutexLock lock(mutex_);
                           count_out();
                         }};
}

// Everything but whether the request fits the model, which was looked at before.
void Pool::Impl::admit(const TicketPtr& ticket) {
  auto& tenant = *tenants_[size_t(ticket->tenant)];
  if (!accepting_) refuse(Status::Unavailable, "the server is about to end; ask another");
  if (!tenant.active) refuse(Status::Forbidden, "tenant '", tenant.config.name, "' is no more");
  const auto beyond = [&](const std::string& text) {
    const double ahead = ticket->model->row_ns * 1e-9 * double(tenant.waiting) /
                         double(std::max<size_t>(seats_.size(), 1));
    throw Refused{{Status::Exhausted, cat("tenant '", tenant.config.name, "' has ", text),
                   std::max(1.0, std::ceil(ahead))}};
  };
  if (tenant.waiting >= size_t(tenant.config.max_queue))
    beyond(cat(tenant.waiting, " requests waiting, of at most ", tenant.config.max_queue));
  // Its answer lies in memory until it is written.
  const auto& seen = ticket->model->seen;
  if (const auto known = seen.find(ticket->model->seen_as(ticket->shape_key)); known != seen.end())
    ticket->bytes += known->second.out * uint64_t(ticket->rows);
  // One alone is taken: it would never be smaller.
  const uint64_t bytes = tenant.waiting_bytes + ticket->bytes;
  if (tenant.waiting > 0 && bytes > options_.max_queue_bytes)
    beyond(cat(bytes, " bytes of requests and answers waiting with this one, of at most ",
               options_.max_queue_bytes, "; serve.max_queue_mb makes it more"));
  if (ticket->model->given_up) throw Refused{unhealthy(*ticket->model)};
  if (ticket->model->facts->stateful) {
    join_sequence(*ticket);
  } else {
    ticket->request.parameters.sequence.clear();  // means nothing to it
    const bool some = std::ranges::any_of(ticket->model->hosted, [&](const auto& hosted) {
      return may_use(ticket->tenant, *hosted->seat);
    });
    if (!some)
      refuse(Status::Forbidden, "model '", ticket->model->config.name, "' is on ",
             owned_places(*ticket->model), " alone, which tenant '", tenant.config.name,
             "' may not use; put it on more by model.devices");
  }
}

std::string Pool::Impl::owned_places(const Model& model) const {
  std::vector<std::string> places;
  for (const auto& hosted : model.hosted) {
    const int owner = hosted->seat->owner;
    places.push_back(
        cat(hosted->seat->name,
            owner < 0 ? "" : cat(" of tenant '", tenants_[size_t(owner)]->config.name, "'")));
  }
  return join(places, ", ");
}

// Where there are fewest. Of several tenants one has at most as many as it leaves to others, so
// that there is a place for who comes new.
Hosted& Pool::Impl::place_of_sequence(const Ticket& ticket) const {
  const auto& model = *ticket.model;
  Hosted* least = nullptr;
  size_t left = 0;
  for (const auto& hosted : model.hosted) {
    if (hosted->state != Hosted::State::Ready || !may_use(ticket.tenant, *hosted->seat)) continue;
    left += kMostSequences - hosted->sequences;
    if (!least || hosted->sequences < least->sequences) least = hosted.get();
  }
  if (!least) refuse(Status::Unavailable, "no replica is ready");
  if (left == 0)
    refuse(Status::Exhausted, "each replica has ", kMostSequences,
           " sequences; end some by sequence_end");
  const auto& tenant = tenants_[size_t(ticket.tenant)];
  const auto shares = [](const auto& one) { return one->active && one->config.devices.empty(); };
  const auto own = model.sequences_of.find(ticket.tenant);
  if (own != model.sequences_of.end() && own->second >= left && shares(tenant) &&
      std::ranges::count_if(tenants_, shares) > 1)
    refuse(Status::Exhausted, "tenant '", tenant->config.name, "' has ", own->second,
           " sequences of model '", model.config.name, "', and may have no more than are left for ",
           "others, ", left, "; end some by sequence_end");
  return *least;
}

// Two tenants may choose the same name.
std::string Pool::Impl::sequence_key(int tenant, const Parameters& parameters) {
  return cat(tenant, "/", parameters.sequence);
}

// Its requests go to the replica that has its state.
void Pool::Impl::join_sequence(Ticket& ticket) {
  auto& model = *ticket.model;
  const auto& parameters = ticket.request.parameters;
  const std::string key = sequence_key(ticket.tenant, parameters);
  auto found = model.sequences.find(key);
  if (found == model.sequences.end() && !parameters.sequence_start) {
    const double idle = model.config.sequence_idle_s;
    refuse(Status::Invalid, "model '", model.config.name, "' knows no sequence '",
           parameters.sequence, "': wanted sequence_start with its first request",
           idle > 0 ? cat(", and the next within sequence_idle_s = ", idle, " s") : "");
  }
  if (found == model.sequences.end()) {
    const Sequence sequence{.hosted = &place_of_sequence(ticket), .tenant = ticket.tenant};
    for (const auto& old : going_) {  // where it is begun anew it is no more
      const auto before = old->sequences.find(key);
      if (before == old->sequences.end() || old->key() != model.key()) continue;
      old->leave(*before->second);
      old->sequences.erase(before);
    }
    found = model.sequences.emplace(key, std::make_shared<Sequence>(sequence)).first;
    ++sequence.hosted->sequences;
    ++model.sequences_of[ticket.tenant];
  }
  ticket.sequence = found->second;
  ++ticket.sequence->in_flight;
  if (parameters.sequence_end) {
    model.leave(*found->second);
    model.sequences.erase(found);
  }
}

void Pool::Impl::enqueue(const TicketPtr& ticket) {
  if (ticket->queued) return;
  ticket->queued = true;
  ++queued_;
  tenants_[size_t(ticket->tenant)]->queues[ticket->model.get()].emplace(
      std::pair(ticket->request.parameters.priority, ticket->number), ticket);
}

// Once, and then never again: what its batches still bring is dropped.
void Pool::Impl::answer(const TicketPtr& ticket, Outcome outcome, Outbox& outbox) {
  if (ticket->answered) return;
  ticket->answered = true;
  if (outcome.status == Status::Unavailable && outcome.retry_after == 0)
    outcome.retry_after = kRetryAfter;
  ticket->answer.outcome = std::move(outcome);
  ticket->answer.model = ticket->model ? ticket->model->config.name : ticket->request.model;
  ticket->answer.version = ticket->model ? ticket->model->config.version : ticket->request.version;
  ticket->answer.id = ticket->request.id;
  if (!ticket->answer.outcome.ok()) {
    ticket->answer.outputs.clear();
    for (const auto& seat : seats_)  // a text that nobody wants is not written to its end
      for (const auto& batch : {seat.first, seat.second})
        if (batch && batch->published && batch->header().is_prompt && !batch->entries.empty() &&
            batch->entries[0].ticket == ticket)
          batch->header().cancelled = 1;
  }
  if (ticket->queued) {
    remove_from_queue(*ticket);
    ticket->queued = false;
    --queued_;
  }
  if (ticket->sequence) {
    --ticket->sequence->in_flight;
    ticket->sequence->used = clock_.now();
  }
  if (ticket->deadline) {
    const auto [begin, end] = deadlines_.equal_range(*ticket->deadline);
    for (auto at = begin; at != end; ++at)
      if (at->second == ticket) {
        deadlines_.erase(at);
        break;
      }
  }
  count(*ticket);
  if (!ticket->stream.empty()) return outbox.streams.push_back(ticket->stream);
  count_out(*ticket);
  outbox.answers.push_back(ticket);
}

void Pool::Impl::send(Outbox& outbox) {
  // What takes an answer may throw; the others are to have theirs.
  const auto hand_over = [&](const auto& give) {
    try {
      give();
    } catch (const std::exception& error) {
      log_.error(cat("whoever asked did not take the answer: ", error.what()));
    }
  };
  for (const auto& line : outbox.lines) line(log_);
  for (auto& text : outbox.texts) hand_over([&] { text.on_text(text.text); });
  if (!outbox.texts.empty()) {
    const MutexLock lock(mutex_);
    for (const auto& text : outbox.texts)
      if (--text.ticket->texts == 0 && !text.ticket->stream.empty())
        outbox.streams.push_back(text.ticket->stream);
  }
  const auto deliver = [&](const TicketPtr& ticket) {
    const auto on_answer = std::move(ticket->on_answer);
    hand_over([&] { on_answer(std::move(ticket->answer)); });
    const MutexLock lock(mutex_);
    ticket->on_answer = nullptr;
    ticket->on_text = nullptr;
    if (ticket->counted) --waiting_;
    if (ticket->model) --ticket->model->in_flight;
    changed_.notify_all();
  };
  for (const auto& ticket : outbox.answers) deliver(ticket);
  for (const auto& name : outbox.streams) {
    for (bool mine = false;;) {
      TicketPtr next;
      {
        const MutexLock lock(mutex_);
        const auto stream = streams_.find(name);
        if (stream == streams_.end() || (stream->second.delivering && !mine)) break;
        auto& order = stream->second.order;
        mine = stream->second.delivering =
            !order.empty() && order.front()->answered && order.front()->texts == 0;
        if (mine) {
          next = order.front();
          order.pop_front();
          count_out(*next);
        } else {
          if (order.empty()) streams_.erase(stream);
          break;
        }
      }
      deliver(next);
    }
  }
  outbox = {};
}

// A tenant's own devices: of those that it names the first seats, which every model there has.
void Pool::Impl::set_owners() {
  for (auto& seat : seats_) seat.owner = -1;
  for (size_t i = 0; i < tenants_.size(); ++i) {
    if (tenants_[i]->config.devices.empty() || !tenants_[i]->active) continue;
    for (const auto& device : topo::parse_devices(tenants_[i]->config.devices, options_.host))
      for (auto& seat : seats_)
        if (seat.owner < 0 && seat.name.starts_with(topo::to_text(device) + "#")) {
          seat.owner = int(i);
          break;
        }
  }
  count_devices();
}

// Whether there are enough of what tenants want for themselves; where no model was placed yet
// nobody knows.
void Pool::Impl::check_owners(const std::vector<TenantConfig>& tenants) const {
  std::map<std::string, int> wanted;
  for (const auto& tenant : tenants) {
    if (tenant.devices.empty()) continue;
    for (const auto& device : topo::parse_devices(tenant.devices, options_.host)) {
      const std::string name = topo::to_text(device);
      const auto there = std::ranges::count_if(
          seats_, [&](const Seat& seat) { return seat.name.starts_with(name + "#"); });
      if (++wanted[name] > there && !seats_.empty())
        fail(Kind::Config, "tenant '", tenant.name, "': devices '", tenant.devices,
             "' cannot be its own: with those of tenants before it that is ", wanted[name], " x ",
             name, ", and the models are on ", there,
             "; name fewer, or put the models on more by model.devices");
    }
  }
}

// Requests for which there is no device any more, and sequences on one that is another's now.
void Pool::Impl::answer_stranded(Outbox& outbox) {
  const auto is_lost = [&](const Sequence& sequence) {
    return !may_use(sequence.tenant, *sequence.hosted->seat);
  };
  std::vector<TicketPtr> stranded;
  for (size_t i = 0; i < tenants_.size(); ++i)
    for (const auto& [model, queue] : tenants_[i]->queues) {
      const bool none = std::ranges::none_of(
          model->hosted, [&](const auto& one) { return may_use(int(i), *one->seat); });
      for (const auto& [key, ticket] : queue)
        if (none || (ticket->sequence && is_lost(*ticket->sequence))) stranded.push_back(ticket);
    }
  for (const auto& ticket : stranded)
    answer(ticket,
           {Status::Unavailable,
            ticket->sequence ? "the device of its sequence is another tenant's now; begin it anew"
                             : "its tenant has no devices any more"},
           outbox);
  for (const auto& model : with_sequences())
    std::erase_if(model->sequences, [&](const auto& entry) {
      if (!is_lost(*entry.second)) return false;
      model->leave(*entry.second);
      return true;
    });
}

Pool::Pool(const PoolOptions& options, observe::Log log, observe::Registry& metrics)
    : impl_(std::make_unique<Impl>(options, std::move(log), metrics)) {
  auto& impl = *impl_;
  set_tenants({});
  if (options.own_thread)
    impl.watcher_ = std::jthread([&impl](const std::stop_token& stop) {
      while (!stop.stop_requested()) impl.watch_once(1000);
    });
}

Pool::~Pool() {
  stop_accepting();
  impl_->watcher_.request_stop();
  impl_->wake();
  if (impl_->watcher_.joinable()) impl_->watcher_.join();
  Outbox outbox;
  {
    const MutexLock lock(impl_->mutex_);
    std::vector<TicketPtr> left;
    for (const auto& tenant : impl_->tenants_)
      for (const auto& [model, queue] : tenant->queues)
        for (const auto& [key, ticket] : queue) left.push_back(ticket);
    for (const auto& seat : impl_->seats_)
      for (const auto& batch : {seat.first, seat.second})
        if (batch)
          for (const auto& entry : batch->entries) left.push_back(entry.ticket);
    for (const auto& ticket : left)
      impl_->answer(ticket, {Status::Unavailable, "the server ended"}, outbox);
  }
  impl_->send(outbox);
  for (auto* hosted : impl_->all_hosted_) hosted->worker.reset();
  // A replica's place holds its model, and the model its places.
  for (auto* models : {&impl_->coming_, &impl_->going_})
    for (const auto& model : *models) model->hosted.clear();
  for (const auto& [key, model] : impl_->models_) model->hosted.clear();
}

int Pool::watch_file() const { return impl_->options_.own_thread ? -1 : impl_->epoll_.get(); }
void Pool::watch_once() { impl_->watch_once(0); }

void Pool::set_tenants(const std::vector<TenantConfig>& given) {
  auto list = given;
  if (list.empty()) list.push_back({.name = "default"});
  std::vector<std::pair<std::string, Share>> shares;
  for (const auto& tenant : list)
    if (tenant.devices.empty()) shares.emplace_back(tenant.name, tenant.share());
  check_shares(shares);
  auto& impl = *impl_;
  Outbox outbox;
  {
    const MutexLock lock(impl.mutex_);
    impl.check_owners(list);
    for (auto& tenant : impl.tenants_) tenant->active = false;
    for (const auto& config : list) {
      // Whoever has devices of its own wants nothing of those of all.
      const Share share = config.devices.empty() ? config.share() : Share{};
      auto found = std::ranges::find(impl.tenants_, config.name,
                                     [](const auto& tenant) { return tenant->config.name; });
      if (found == impl.tenants_.end()) {
        auto tenant = std::make_unique<Tenant>();
        const observe::Labels labels{{"tenant", config.name}};
        auto& metrics = impl.metrics_;
        impl.share_.add(share, impl.clock_.now());  // its number is the tenant's
        tenant->device_s = &metrics.counter("yoke_tenant_device_seconds_total",
                                            "Device time of a tenant's rows.", labels);
        tenant->borrowed_s =
            &metrics.counter("yoke_tenant_borrowed_seconds_total",
                             "Device time taken while its guarantee was used up.", labels);
        tenant->requests =
            &metrics.counter("yoke_tenant_requests_total", "Answers of models.", labels);
        tenant->refusals =
            &metrics.counter("yoke_tenant_refused_total", "Requests beyond its bound.", labels);
        tenant->pending =
            &metrics.gauge("yoke_tenant_pending_requests", "Requests without an answer.", labels);
        tenant->latency = &metrics.histogram("yoke_tenant_latency_ms", "From arrival to answer.",
                                             latency_bounds(), labels);
        impl.tenants_.push_back(std::move(tenant));
        found = std::prev(impl.tenants_.end());
      }
      (*found)->config = config;
      (*found)->active = true;
      impl.share_.change(int(found - impl.tenants_.begin()), share);
    }
    for (size_t i = 0; i < impl.tenants_.size(); ++i)
      if (!impl.tenants_[i]->active) impl.share_.change(int(i), {});
    impl.set_owners();
    impl.answer_stranded(outbox);
    impl.pump();
  }
  impl.send(outbox);
}

int Pool::tenant(const std::string& name) const {
  const MutexLock lock(impl_->mutex_);
  for (size_t i = 0; i < impl_->tenants_.size(); ++i)
    if (impl_->tenants_[i]->active && impl_->tenants_[i]->config.name == name) return int(i);
  fail(Kind::Usage, "there is no tenant '", name, "'");
}

Pool::TicketPtr Pool::submit(Request request, int tenant, OnAnswer on_answer, OnText on_text,
                             When when) {
  auto& impl = *impl_;
  auto ticket = std::make_shared<Ticket>();
  ticket->tenant = tenant;
  ticket->on_answer = std::move(on_answer);
  ticket->on_text = std::move(on_text);
  ticket->arrival = impl.clock_.now();
  std::optional<Outcome> refused;
  std::shared_ptr<Model> model;
  std::shared_ptr<const Facts> facts;
  try {
    {
      const MutexLock lock(impl.mutex_);
      model = impl.find_for(request, tenant);
      if (model) facts = model->facts;
      if (model) ++model->in_flight;  // it stays while this is looked at
      if (!model && impl.find_coming(request.model, request.version))
        refuse(Status::Unavailable, "model '", request.model, "' is not ready yet");
    }
    if (!model) refuse_unknown(request.model, request.version);
    if (!facts) refuse(Status::Unavailable, "model '", request.model, "' is not ready");
    const int64_t rows = check_request(request.model, *facts, request);
    ticket->rows = std::max<int64_t>(rows, 1);
    uint64_t bytes = 0;
    for (const auto& input : request.inputs) {
      ticket->bytes += input.data.size();
      bytes += input.data.size() / size_t(input.type == Type::Bytes ? 1 : ticket->rows) + 64;
    }
    if (request.prompt) {
      ticket->bytes += request.prompt->text.size();
      bytes += request.prompt->text.size() + 4096;
    }
    if (bytes > impl.options_.slab_bytes / 2)
      refuse(Status::TooLarge, "model '", request.model, "': a row has ", bytes,
             " bytes, of at most ", impl.options_.slab_bytes / 2, "; serve.slab_mb makes it more");
    ticket->bytes = std::max(ticket->bytes, request.held_bytes);
    ticket->shape_key = shape_key(request, *facts);
  } catch (Refused& why) {
    refused = std::move(why.outcome);
  }
  if (request.parameters.priority == 0) request.parameters.priority = kUsualPriority;
  if (request.parameters.timeout > Duration::zero())
    ticket->deadline = ticket->arrival + request.parameters.timeout;
  if (!request.parameters.stream.empty())
    ticket->stream = cat(tenant, "/", request.parameters.stream);
  ticket->request = std::move(request);
  Outbox outbox;
  {
    const MutexLock lock(impl.mutex_);
    ticket->number = impl.next_number_++;
    try {
      if (refused) throw Refused{*refused};
      ticket->model = model;
      impl.admit(ticket);
      ticket->row_key = impl.next_row_key_;
      impl.next_row_key_ += uint64_t(ticket->rows);
      ticket->todo = {{0, is_whole(ticket->request, *facts) ? 1 : ticket->rows}};
      if (ticket->deadline) {
        impl.deadlines_.emplace(*ticket->deadline, ticket);
        impl.look_by(*ticket->deadline);
      }
      impl.count_in(*ticket);
      if (!ticket->stream.empty()) impl.streams_[ticket->stream].order.push_back(ticket);
      impl.enqueue(ticket);
      if (when == When::Now) impl.pump();
    } catch (Refused& why) {
      ticket->model = nullptr;
      ticket->request.inputs.clear();  // a stream may keep it for long
      ticket->request.holds.clear();
      ticket->request.prompt.reset();
      if (model) {
        --model->in_flight;
        const auto status = why.outcome.status;
        if (status == Status::Exhausted || status == Status::Unavailable) model->rejected->add();
      }
      // Behind others it counts as they do; beyond the bound it is told at once.
      ticket->bytes = 0;
      const auto& asks = *impl.tenants_[size_t(tenant)];
      if (asks.waiting >= size_t(asks.config.max_queue)) {
        ticket->stream.clear();
      } else if (!ticket->stream.empty() || ticket->request.may_be_held) {
        impl.count_in(*ticket);
        if (!ticket->stream.empty()) impl.streams_[ticket->stream].order.push_back(ticket);
      }
      impl.answer(ticket, std::move(why.outcome), outbox);
    }
  }
  impl.send(outbox);
  return ticket;
}

void Pool::dispatch() {
  const MutexLock lock(impl_->mutex_);
  impl_->pump();
}

void Pool::cancel(const TicketPtr& ticket) {
  Outbox outbox;
  {
    const MutexLock lock(impl_->mutex_);
    impl_->answer(ticket, {Status::Cancelled, "the request was cancelled"}, outbox);
  }
  impl_->send(outbox);
}

void Pool::stop_accepting() {
  const MutexLock lock(impl_->mutex_);
  impl_->accepting_ = false;
  impl_->changed_.notify_all();
}

bool Pool::drain(Time deadline) {
  stop_accepting();
  const MutexLock lock(impl_->mutex_);
  return impl_->changed_.wait_until(impl_->mutex_, deadline,
                                    [this] { return impl_->waiting_ == 0; });
}

}  // namespace yoke::serve
