// SPDX-License-Identifier: Apache-2.0
// Models of a pool: where they are placed, how they come and go.
#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/serve/pool_impl.h"
#include "yoke/topo/device.h"
#include "yoke/topo/host.h"

namespace yoke::serve {
namespace {

bool is_newer(const std::string& one, const std::string& other) {
  return one.size() != other.size() ? one.size() > other.size() : one > other;  // of numbers
}

}  // namespace

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

// A sequence ends where it began, though its model was loaded anew meanwhile.
std::shared_ptr<Model> Pool::Impl::find_for(const Request& request, int tenant) const {
  auto model = find(request.model, request.version);
  const auto& parameters = request.parameters;
  if (!model || parameters.sequence.empty() || parameters.sequence_start) return model;
  const std::string key = sequence_key(tenant, parameters);
  const auto old = std::ranges::find_if(going_, [&](const auto& one) {
    return one->key() == model->key() && one->sequences.contains(key);
  });
  return old == going_.end() ? model : *old;
}

std::vector<std::shared_ptr<Model>> Pool::Impl::with_sequences() const {
  auto models = going_;
  for (const auto& [key, model] : models_) models.push_back(model);
  return models;
}

std::shared_ptr<Model> Pool::Impl::find_coming(const std::string& name,
                                               const std::string& version) const {
  const auto found = std::ranges::find_if(coming_, [&](const auto& model) {
    return model->config.name == name && (version.empty() || model->config.version == version);
  });
  return found == coming_.end() ? nullptr : *found;
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
    auto hosted = std::make_shared<Hosted>();
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
                    .tokenizer = model->config.tokenizer,
                    .record = model->config.record,
                    .timed = options_.trace > 0};
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

std::shared_ptr<Model> Pool::Impl::load(const ModelConfig& config, bool awaited) {
  auto& impl = *this;
  auto model = std::make_shared<Model>();
  model->config = config;
  model->awaited = awaited;
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

const Model* Pool::Impl::awaited() const {
  const auto found = std::ranges::find_if(coming_, [](const auto& one) { return one->awaited; });
  return found == coming_.end() ? nullptr : found->get();
}

void Pool::load(const ModelConfig& config) { impl_->load(config, true); }

void Pool::load_and_wait(const ModelConfig& config, Duration timeout) {
  auto& impl = *impl_;
  const auto model = impl.load(config, false);
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
    if (model->awaited && model->state == ModelState::Unavailable)
      fail(Kind::Config, "model '", model->config.name, "': ", model->reason);
}

bool Pool::all_loaded() const {
  const MutexLock lock(impl_->mutex_);
  return !impl_->awaited();
}

void Pool::wait_ready(Duration timeout) {
  auto& impl = *impl_;
  const Time deadline = impl.clock_.now() + timeout;
  while (!all_loaded()) {
    check_loading();
    const MutexLock lock(impl.mutex_);
    if (const auto* model = impl.awaited(); model && impl.clock_.now() >= deadline)
      fail(Kind::Timeout, "model '", model->config.name, "' was not ready in time");
    impl.changed_.wait_until(impl.mutex_,
                             std::min(deadline, impl.clock_.now() + std::chrono::milliseconds(50)));
  }
}

}  // namespace yoke::serve
