// SPDX-License-Identifier: Apache-2.0
// What a pool tells of itself: counts of what was answered, views, metrics.
#include <algorithm>

#include "yoke/base/text.h"
#include "yoke/serve/pool_impl.h"

namespace yoke::serve {
namespace {

constexpr size_t kLatest = 512;  // answers that percentiles are of

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }
double micros(Duration duration) { return 1e6 * seconds(duration); }

}  // namespace

const char* to_text(ModelState state) {
  constexpr const char* kTexts[] = {"LOADING", "READY", "UNAVAILABLE", "UNLOADING"};
  return kTexts[size_t(state)];
}

void count_refused(observe::Registry& metrics, Status status) {
  metrics
      .counter("yoke_refused_requests_total", "Requests that no model was asked for, by status.",
               {{"status", status_name(status)}})
      .add();
}

void Pool::Impl::count(const Ticket& ticket) {
  auto& tenant = *tenants_[size_t(ticket.tenant)];
  const auto status = ticket.answer.outcome.status;
  const Duration total = clock_.now() - ticket.arrival;
  if (status == Status::Exhausted) ++tenant.refused, tenant.refusals->add();
  if (!ticket.model) return count_refused(metrics_, status);
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

bool Pool::ready() const {
  const MutexLock lock(impl_->mutex_);
  if (!impl_->accepting_) return false;
  const auto first = std::ranges::none_of(impl_->coming_, [&](const auto& model) {
    return model->awaited && !impl_->models_.contains(model->key());  // else it goes on meanwhile
  });
  return first && std::ranges::all_of(impl_->models_, [](const auto& entry) {
           return entry.second->state == ModelState::Ready;
         });
}

std::optional<ModelView> Pool::find(const std::string& name, const std::string& version) const {
  const MutexLock lock(impl_->mutex_);
  auto model = impl_->find(name, version);
  if (!model) model = impl_->find_coming(name, version);
  if (!model) return std::nullopt;
  return impl_->view_of(*model);
}

void Pool::refuse_unknown(const std::string& name, const std::string& version) const {
  constexpr size_t kMost = 8;
  std::vector<std::string> there;
  {
    const MutexLock lock(impl_->mutex_);
    for (const auto& [key, model] : impl_->models_) there.push_back(key);
  }
  if (there.size() > kMost) there.resize(kMost), there.emplace_back("…");
  refuse(Status::NotFound, "there is no model '", name, "'",
         version.empty() ? "" : cat(" of version ", version),
         there.empty() ? "" : cat("; there are: ", join(there, ", ")));
}

std::string Pool::trace() const {
  const MutexLock lock(impl_->mutex_);
  return impl_->trace_.json();
}

observe::Labels labels_of(const Hosted& hosted) {
  return {{"replica", std::to_string(hosted.number)},
          {"model", hosted.model->config.name},
          {"device", hosted.seat->name}};
}

PoolView Pool::view() const {
  PoolView view{.ready = ready()};
  const MutexLock lock(impl_->mutex_);
  auto& impl = *impl_;
  view.draining = !impl.accepting_;
  view.devices = int(impl.seats_.size());
  for (const auto& model : impl.going_) model->pending->set(double(impl.waiting_for(*model)));
  for (const auto& [key, model] : impl.models_) {
    view.models.push_back(impl.view_of(*model));
    model->pending->set(double(view.models.back().waiting));
  }
  for (const auto& model : impl.coming_) view.models.push_back(impl.view_of(*model));
  for (const auto* hosted : impl.all_hosted_) {
    constexpr const char* kStates[] = {"starting", "ready", "dead"};
    const auto rows = [&](const BatchPtr& batch) {
      return batch && batch->hosted.get() == hosted ? int(batch->rows) : 0;
    };
    view.replicas.push_back({.number = hosted->number,
                             .model = hosted->model->config.name,
                             .device = hosted->seat->name,
                             .state = kStates[size_t(hosted->state)],
                             .restarts = hosted->restarts,
                             .computing = rows(hosted->seat->first),
                             .staged = rows(hosted->seat->second),
                             .sequences = hosted->sequences,
                             .pid = hosted->worker ? hosted->worker->pid() : 0,
                             .batches = hosted->batches,
                             .rows = hosted->rows,
                             .busy = hosted->busy,
                             .version = hosted->model->config.version,
                             .parts = hosted->parts});
    const auto gauge = [&](const char* name, const char* help, double value) {
      impl.metrics_.gauge(name, help, labels_of(*hosted)).set(value);
    };
    gauge("yoke_replica_ready", "1 where it takes work.", hosted->state == Hosted::State::Ready);
    gauge("yoke_replica_restarts", "Workers that ended and were replaced.", hosted->restarts);
    gauge("yoke_replica_busy_seconds", "Time that it computed.", seconds(hosted->busy));
    gauge("yoke_replica_batches", "Batches that it computed.", double(hosted->batches));
  }
  for (const auto& tenant : impl.tenants_) {
    if (!tenant->active && tenant->usage.empty()) continue;
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
                            .p99_ms = at(0.99),
                            .active = tenant->active});
  }
  return view;
}

}  // namespace yoke::serve
