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
constexpr size_t kLatest = 512;               // answers that percentiles are of

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }
double micros(Duration duration) { return 1e6 * seconds(duration); }

std::string shape_key(const Request& request) {
  std::string key;
  for (const auto& input : request.inputs) {
    key += char(input.type);
    for (size_t i = 1; i < input.shape.size(); ++i) key += cat(input.shape[i], ",");
  }
  return key;
}

std::vector<double> latency_bounds() { return observe::exponential_bounds(0.1, 2, 16); }  // ms

bool is_newer(const std::string& one, const std::string& other) {
  return one.size() != other.size() ? one.size() > other.size() : one > other;  // of numbers
}

}  // namespace

const char* to_text(ModelState state) {
  constexpr const char* kTexts[] = {"LOADING", "READY", "UNAVAILABLE", "UNLOADING"};
  return kTexts[size_t(state)];
}

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

std::shared_ptr<Model> Pool::Impl::find(const std::string& name, const std::string& version) const {
  if (!version.empty()) {
    const auto found = models_.find(name + "/" + version);
    return found == models_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Model> best;
  for (const auto& [key, model] : models_) {
    if (model->config.name != name) continue;
    const bool better =
        !best || (model->state == ModelState::Ready) > (best->state == ModelState::Ready) ||
        ((model->state == best->state) && is_newer(model->config.version, best->config.version));
    if (better) best = model;
  }
  return best;
}

// Everything but whether the request fits the model, which was looked at before.
void Pool::Impl::admit(const TicketPtr& ticket) {
  auto& tenant = *tenants_[size_t(ticket->tenant)];
  if (!accepting_) refuse(Status::Unavailable, "the server is about to end; ask another");
  if (!tenant.active) refuse(Status::Forbidden, "tenant '", tenant.config.name, "' is no more");
  if (tenant.waiting >= size_t(tenant.config.max_queue)) {
    const double ahead = ticket->model->row_ns * 1e-9 * double(tenant.waiting) /
                         double(std::max<size_t>(seats_.size(), 1));
    throw Refused{{Status::Exhausted,
                   cat("tenant '", tenant.config.name, "' has ", tenant.waiting,
                       " requests waiting, of at most ", tenant.config.max_queue),
                   std::max(1.0, std::ceil(ahead))}};
  }
  if (ticket->model->given_up) throw Refused{unhealthy(*ticket->model)};
  const auto& facts = *ticket->model->facts;
  if (facts.stateful) {
    auto& sequences = ticket->model->sequences;
    const std::string key = cat(ticket->tenant, "/", ticket->request.parameters.sequence);
    auto found = sequences.find(key);
    if (found == sequences.end() && !ticket->request.parameters.sequence_start)
      refuse(Status::Invalid, "model '", ticket->model->config.name, "' knows no sequence '",
             ticket->request.parameters.sequence,
             "': wanted sequence_start with its first request");
    if (found == sequences.end()) {
      Hosted* least = nullptr;
      for (const auto& hosted : ticket->model->hosted)
        if (hosted->state == Hosted::State::Ready && may_use(ticket->tenant, *hosted->seat) &&
            (!least || hosted->sequences < least->sequences))
          least = hosted.get();
      if (!least) refuse(Status::Unavailable, "no replica is ready");
      if (least->sequences >= 1024)
        refuse(Status::Exhausted, "each replica has 1024 sequences; end some by sequence_end");
      found = sequences.emplace(key, least).first;
      ++least->sequences;
    }
    ticket->sticky = found->second;
    if (ticket->request.parameters.sequence_end) {
      --found->second->sequences;
      sequences.erase(found);
    }
  } else {
    ticket->request.parameters.sequence.clear();  // means nothing to it
    const bool some = std::ranges::any_of(ticket->model->hosted, [&](const auto& hosted) {
      return may_use(ticket->tenant, *hosted->seat);
    });
    if (!some)
      refuse(Status::Unavailable, "model '", ticket->model->config.name,
             "' has no replica on the devices of tenant '", tenant.config.name, "'");
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
  if (ticket->deadline) {
    const auto [begin, end] = deadlines_.equal_range(*ticket->deadline);
    for (auto at = begin; at != end; ++at)
      if (at->second == ticket) {
        deadlines_.erase(at);
        break;
      }
  }
  count(*ticket);
  if (ticket->stream.empty())
    outbox.answers.push_back(ticket);
  else
    outbox.streams.push_back(ticket->stream);
}

void Pool::Impl::send(Outbox& outbox) {
  for (auto& [on_text, text] : outbox.texts) on_text(text);
  const auto deliver = [&](const TicketPtr& ticket) {
    const auto on_answer = std::move(ticket->on_answer);
    on_answer(std::move(ticket->answer));
    const MutexLock lock(mutex_);
    ticket->on_answer = nullptr;
    ticket->on_text = nullptr;
    if (ticket->model) {
      --tenants_[size_t(ticket->tenant)]->waiting;
      --waiting_;
      --ticket->model->in_flight;
      changed_.notify_all();
    }
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
        mine = stream->second.delivering = !order.empty() && order.front()->answered;
        if (mine) {
          next = order.front();
          order.pop_front();
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

void Pool::Impl::count(const Ticket& ticket) {
  auto& tenant = *tenants_[size_t(ticket.tenant)];
  const auto status = ticket.answer.outcome.status;
  const Duration total = clock_.now() - ticket.arrival;
  if (status == Status::Exhausted) ++tenant.refused, tenant.refusals->add();
  if (!ticket.model) return;
  auto& model = *ticket.model;
  if (status == Status::Ok) {
    model.stats.success.add(total);
    model.stats.queue.add(ticket.answer.timing.queue);
    model.stats.input.add(ticket.answer.timing.input);
    model.stats.compute.add(ticket.answer.timing.compute);
    model.stats.output.add(ticket.answer.timing.output);
    model.stats.rows += uint64_t(ticket.rows);
    model.success->add();
    model.rows->add(double(ticket.rows));
    model.request_us->add(micros(total));
    model.queue_us->add(micros(ticket.answer.timing.queue));
    model.input_us->add(micros(ticket.answer.timing.input));
    model.compute_us->add(micros(ticket.answer.timing.compute));
    model.output_us->add(micros(ticket.answer.timing.output));
  } else {
    model.stats.fail.add(total);
    (status == Status::Exhausted || status == Status::Unavailable || status == Status::Deadline
         ? model.rejected
     : status == Status::Cancelled ? model.cancelled
                                   : model.failed)
        ->add();
  }
  model.stats.last_ms = uint64_t(std::chrono::duration_cast<std::chrono::milliseconds>(
                                     std::chrono::system_clock::now().time_since_epoch())
                                     .count());
  model.latency->observe(1e3 * seconds(total));
  tenant.latency->observe(1e3 * seconds(total));
  tenant.requests->add();
  auto& usage = tenant.usage[model.config.name];
  ++usage.requests;
  if (status == Status::Ok) usage.rows += uint64_t(ticket.rows);
  tenant.latest_ms.push_back(1e3 * seconds(total));
  if (tenant.latest_ms.size() > kLatest) tenant.latest_ms.pop_front();
}

size_t Pool::Impl::waiting_for(const Model& model) const {
  size_t sum = 0;
  for (const auto& tenant : tenants_)
    if (const auto queue = tenant->queues.find(const_cast<Model*>(&model));
        queue != tenant->queues.end())
      sum += queue->second.size();
  return sum;
}

ModelView Pool::Impl::view_of(const Model& model) const {
  return {.name = model.config.name,
          .version = model.config.version,
          .state = model.state,
          .reason = model.reason,
          .facts = model.facts,
          .config = model.config,
          .stats = model.stats,
          .waiting = waiting_for(model)};
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

// Requests for which there is no device any more.
void Pool::Impl::answer_stranded(Outbox& outbox) {
  std::vector<TicketPtr> stranded;
  for (size_t i = 0; i < tenants_.size(); ++i)
    for (const auto& [model, queue] : tenants_[i]->queues)
      if (std::ranges::none_of(model->hosted,
                               [&](const auto& one) { return may_use(int(i), *one->seat); }))
        for (const auto& [key, ticket] : queue) stranded.push_back(ticket);
  for (const auto& ticket : stranded)
    answer(ticket, {Status::Unavailable, "its tenant has no devices any more"}, outbox);
}

void Pool::Impl::place(const std::shared_ptr<Model>& model) {
  const auto devices = topo::parse_devices(model->config.devices, options_.host);
  const size_t count = model->config.replicas > 0 ? size_t(model->config.replicas) : devices.size();
  std::map<std::string, int> on;
  for (size_t i = 0; i < count; ++i) {
    const std::string device = topo::to_text(devices[i % devices.size()]);
    const std::string name = cat(device, "#", on[device]++);
    auto seat = std::ranges::find(seats_, name, &Seat::name);
    if (seat == seats_.end()) {
      seats_.push_back({.name = name});
      seat = std::prev(seats_.end());
    }
    auto hosted = std::make_unique<Hosted>();
    hosted->number = next_replica_++;
    hosted->model = model;
    hosted->seat = &*seat;
    hosted->spec = {.number = int64_t(i),
                    .path = model->config.path,
                    .device = device,
                    .inputs = model->config.input,
                    .outputs = model->config.output,
                    .batch = model->config.batch,
                    .precision = model->config.precision,
                    .stateful = model->config.stateful,
                    .tokenizer = model->config.tokenizer};
    seat->hosted.push_back(hosted.get());
    all_hosted_.push_back(hosted.get());
    model->hosted.push_back(std::move(hosted));
  }
  const auto on_cpu =
      std::ranges::count_if(seats_, [](const Seat& seat) { return seat.name.starts_with("cpu"); });
  const int64_t cores =
      options_.host ? options_.host->num_usable_cpus : int64_t(std::thread::hardware_concurrency());
  for (const auto& hosted : model->hosted)
    hosted->spec.threads = std::max<int64_t>(1, cores / std::max<int64_t>(on_cpu, 1));
  set_owners();
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
    for (const auto& model : *models) impl_->graveyard_.push_back(std::move(model->hosted));
  for (const auto& [key, model] : impl_->models_)
    impl_->graveyard_.push_back(std::move(model->hosted));
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
  for (const auto& tenant : list)
    if (!tenant.devices.empty()) topo::parse_devices(tenant.devices, impl.options_.host);
  Outbox outbox;
  {
    const MutexLock lock(impl.mutex_);
    for (auto& tenant : impl.tenants_) tenant->active = false;
    for (const auto& config : list) {
      auto found = std::ranges::find(impl.tenants_, config.name,
                                     [](const auto& tenant) { return tenant->config.name; });
      if (found == impl.tenants_.end()) {
        auto tenant = std::make_unique<Tenant>();
        const observe::Labels labels{{"tenant", config.name}};
        auto& metrics = impl.metrics_;
        impl.share_.add(config.share(), impl.clock_.now());  // its number is the tenant's
        tenant->device_s = &metrics.counter("yoke_tenant_device_seconds_total",
                                            "Device time of a tenant's rows.", labels);
        tenant->borrowed_s =
            &metrics.counter("yoke_tenant_borrowed_seconds_total",
                             "Device time taken while its guarantee was used up.", labels);
        tenant->requests =
            &metrics.counter("yoke_tenant_requests_total", "Requests that were answered.", labels);
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
      impl.share_.change(int(found - impl.tenants_.begin()), config.share());
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

std::shared_ptr<Model> Pool::Impl::load(const ModelConfig& config) {
  auto& impl = *this;
  auto model = std::make_shared<Model>();
  model->config = config;
  const observe::Labels labels{{"model", config.name}, {"version", config.version}};
  const auto counter = [&](const char* name, const char* help, const char* reason = nullptr) {
    auto with = labels;
    if (reason) with.emplace_back("reason", reason);
    return &impl.metrics_.counter(name, help, with);
  };
  const char *failed = "nv_inference_request_failure", *about = "Requests that failed.";
  model->success = counter("nv_inference_request_success", "Requests that succeeded.");
  model->rejected = counter(failed, about, "REJECTED");
  model->cancelled = counter(failed, about, "CANCELED");
  model->failed = counter(failed, about, "BACKEND");
  model->rows = counter("nv_inference_count", "Rows that were computed for requests.");
  model->batches = counter("nv_inference_exec_count", "Batches that were computed.");
  model->request_us = counter("nv_inference_request_duration_us", "From arrival to answer.");
  model->queue_us = counter("nv_inference_queue_duration_us", "Until a batch began.");
  model->input_us = counter("nv_inference_compute_input_duration_us", "Of taking inputs.");
  model->compute_us = counter("nv_inference_compute_infer_duration_us", "Of the model.");
  model->output_us = counter("nv_inference_compute_output_duration_us", "Of giving outputs.");
  model->pending = &impl.metrics_.gauge("nv_inference_pending_request_count",
                                        "Requests that wait for a batch.", labels);
  model->batch_rows = &impl.metrics_.histogram("yoke_batch_rows", "Rows of a batch.",
                                               observe::exponential_bounds(1, 2, 11), labels);
  model->latency = &impl.metrics_.histogram("yoke_model_latency_ms", "From arrival to answer.",
                                            latency_bounds(), labels);
  const MutexLock lock(impl.mutex_);
  impl.place(model);
  impl.coming_.push_back(model);
  impl.wake();
  return model;
}

void Pool::load(const ModelConfig& config) { impl_->load(config); }

void Pool::load_and_wait(const ModelConfig& config, Duration timeout) {
  auto& impl = *impl_;
  const auto model = impl.load(config);
  const Time deadline = impl.clock_.now() + timeout;
  const MutexLock lock(impl.mutex_);
  const auto is_coming = [&] { return std::ranges::count(impl.coming_, model) > 0; };
  while (is_coming() && model->state == ModelState::Loading && impl.clock_.now() < deadline &&
         impl.accepting_)
    impl.changed_.wait_until(impl.mutex_, deadline);
  if (!is_coming()) return;
  const bool late = model->state == ModelState::Loading;
  std::erase(impl.coming_, model);
  model->state = ModelState::Unloading;
  impl.going_.push_back(model);
  impl.wake();
  fail(late ? Kind::Timeout : Kind::Config,
       late ? cat("it was not ready within ", duration_text(timeout)) : model->reason);
}

bool Pool::unload(const std::string& name, const std::string& version) {
  auto& impl = *impl_;
  const MutexLock lock(impl.mutex_);
  std::vector<std::shared_ptr<Model>> found;
  for (const auto& [key, model] : impl.models_)
    if (model->config.name == name && (version.empty() || model->config.version == version))
      found.push_back(model);
  for (const auto& model : found) impl.retire(model);
  impl.wake();
  return !found.empty();
}

void Pool::check_loading() const {
  const MutexLock lock(impl_->mutex_);
  for (const auto& model : impl_->coming_)
    if (model->state == ModelState::Unavailable)
      fail(Kind::Config, "model '", model->config.name, "': ", model->reason);
}

bool Pool::all_loaded() const {
  const MutexLock lock(impl_->mutex_);
  return impl_->coming_.empty();
}

void Pool::wait_ready(Duration timeout) {
  auto& impl = *impl_;
  const Time deadline = impl.clock_.now() + timeout;
  while (!all_loaded()) {
    check_loading();
    const MutexLock lock(impl.mutex_);
    if (impl.clock_.now() >= deadline && !impl.coming_.empty())
      fail(Kind::Timeout, "model '", impl.coming_[0]->config.name, "' was not ready in time");
    impl.changed_.wait_until(impl.mutex_,
                             std::min(deadline, impl.clock_.now() + std::chrono::milliseconds(50)));
  }
}

Pool::TicketPtr Pool::submit(Request request, int tenant, OnAnswer on_answer, OnText on_text) {
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
      model = impl.find(request.model, request.version);
      if (model) facts = model->facts;
      if (model) ++model->in_flight;  // it stays while this is looked at
    }
    if (!model)
      refuse(Status::NotFound, "there is no model '", request.model, "'",
             request.version.empty() ? "" : cat(" of version ", request.version));
    if (!facts) refuse(Status::Unavailable, "model '", request.model, "' is not ready");
    const int64_t rows = check_request(request.model, *facts, request);
    ticket->rows = std::max<int64_t>(rows, 1);
    uint64_t bytes = 0;
    for (const auto& input : request.inputs)
      bytes += input.data.size() / size_t(input.type == Type::Bytes ? 1 : ticket->rows) + 64;
    if (request.prompt) bytes += request.prompt->text.size() + 4096;
    if (bytes > impl.options_.slab_bytes / 2)
      refuse(Status::TooLarge, "model '", request.model, "': a row has ", bytes,
             " bytes, of at most ", impl.options_.slab_bytes / 2, "; serve.slab_mb makes it more");
    ticket->shape_key = shape_key(request);
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
      ticket->todo = {{0, facts->batch > 0 ? ticket->rows : 1}};
      if (!ticket->request.prompt && facts->batch > 0 &&
          std::ranges::count(ticket->request.inputs, Type::Bytes, &Tensor::type) > 0)
        ticket->todo = {{0, 1}};
      if (ticket->deadline) {
        impl.deadlines_.emplace(*ticket->deadline, ticket);
        impl.look_by(*ticket->deadline);
      }
      ++impl.waiting_;
      ++impl.tenants_[size_t(tenant)]->waiting;
      if (!ticket->stream.empty()) impl.streams_[ticket->stream].order.push_back(ticket);
      impl.enqueue(ticket);
      impl.pump();
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
      if (!ticket->stream.empty()) impl.streams_[ticket->stream].order.push_back(ticket);
      impl.answer(ticket, std::move(why.outcome), outbox);
    }
  }
  impl.send(outbox);
  return ticket;
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

bool Pool::ready() const {
  const MutexLock lock(impl_->mutex_);
  if (!impl_->accepting_ || impl_->models_.empty()) return false;
  const auto first = std::ranges::all_of(impl_->coming_, [&](const auto& model) {
    return impl_->models_.contains(model->key());  // a new one of something that serves
  });
  return first && std::ranges::all_of(impl_->models_, [](const auto& entry) {
           return entry.second->state == ModelState::Ready;
         });
}

std::optional<ModelView> Pool::find(const std::string& name, const std::string& version) const {
  const MutexLock lock(impl_->mutex_);
  const auto model = impl_->find(name, version);
  if (!model) return std::nullopt;
  return impl_->view_of(*model);
}

std::string Pool::trace() const {
  const MutexLock lock(impl_->mutex_);
  return impl_->trace_.json();
}

PoolView Pool::view() const {
  PoolView view{.ready = ready()};
  const MutexLock lock(impl_->mutex_);
  auto& impl = *impl_;
  view.draining = !impl.accepting_;
  view.devices = int(impl.seats_.size());
  for (const auto& [key, model] : impl.models_) {
    view.models.push_back(impl.view_of(*model));
    model->pending->set(double(view.models.back().waiting));
  }
  for (const auto& model : impl.coming_) view.models.push_back(impl.view_of(*model));
  for (const auto* hosted : impl.all_hosted_) {
    constexpr const char* kStates[] = {"starting", "ready", "dead"};
    const auto rows = [&](const BatchPtr& batch) {
      return batch && batch->hosted == hosted ? int(batch->rows) : 0;
    };
    view.replicas.push_back({.number = hosted->number,
                             .model = hosted->model->config.name,
                             .device = hosted->seat->name,
                             .state = kStates[size_t(hosted->state)],
                             .restarts = hosted->restarts,
                             .computing = rows(hosted->seat->first),
                             .staged = rows(hosted->seat->second),
                             .pid = hosted->worker ? hosted->worker->pid() : 0,
                             .batches = hosted->batches,
                             .rows = hosted->rows,
                             .busy = hosted->busy});
    const observe::Labels labels{{"replica", std::to_string(hosted->number)},
                                 {"model", hosted->model->config.name},
                                 {"device", hosted->seat->name}};
    const auto gauge = [&](const char* name, const char* help, double value) {
      impl.metrics_.gauge(name, help, labels).set(value);
    };
    gauge("yoke_replica_ready", "1 where it takes work.", hosted->state == Hosted::State::Ready);
    gauge("yoke_replica_restarts", "Workers that ended and were replaced.", hosted->restarts);
    gauge("yoke_replica_busy_seconds", "Time that it computed.", seconds(hosted->busy));
    gauge("yoke_replica_batches", "Batches that it computed.", double(hosted->batches));
  }
  for (const auto& tenant : impl.tenants_) {
    if (!tenant->active) continue;
    tenant->pending->set(double(tenant->waiting));
    std::vector<double> latest(tenant->latest_ms.begin(), tenant->latest_ms.end());
    std::ranges::sort(latest);
    const auto at = [&](double part) {
      return latest.empty() ? 0 : latest[size_t(part * double(latest.size() - 1))];
    };
    view.tenants.push_back({.name = tenant->config.name,
                            .share = tenant->config.share(),
                            .waiting = tenant->waiting,
                            .device_s = tenant->device_s->value(),
                            .borrowed_s = tenant->borrowed_s->value(),
                            .by_model = tenant->usage,
                            .refused = tenant->refused,
                            .p50_ms = at(0.5),
                            .p99_ms = at(0.99)});
  }
  return view;
}

}  // namespace yoke::serve
