// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/service.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/observe/json_lines.h"
#include "yoke/serve/keys.h"

namespace yoke::serve {
namespace {

using nlohmann::json;
using ordered = nlohmann::ordered_json;

ordered ports_of(const std::vector<Port>& ports) {
  ordered list = ordered::array();
  for (const auto& port : ports)
    list.push_back(
        {{"name", port.name}, {"datatype", plan::type_name(port.type)}, {"shape", port.sizes()}});
  return list;
}

// As in the model configuration of Triton: without the size of the batch.
ordered config_ports(const Facts& facts, const std::vector<Port>& ports) {
  ordered list = ordered::array();
  for (const auto& port : ports) {
    auto dims = port.sizes();
    if (facts.batch > 0 && !dims.empty()) dims.erase(dims.begin());
    const std::string type = plan::type_name(port.type);
    list.push_back({{"name", port.name},
                    {"data_type", "TYPE_" + (type == "BYTES" ? "STRING" : type)},
                    {"dims", dims}});
  }
  return list;
}

ordered duration(const StatDuration& stat) {
  return {{"count", stat.count}, {"ns", stat.time.count()}};
}

ordered stats_of(const ModelView& model, const std::vector<ReplicaView>& replicas) {
  const auto& stats = model.stats;
  ordered batches = ordered::array();
  for (const auto& [rows, batch] : stats.by_rows)
    batches.push_back({{"batch_size", rows},
                       {"compute_input", duration(batch.input)},
                       {"compute_infer", duration(batch.compute)},
                       {"compute_output", duration(batch.output)}});
  const ordered none = duration({});
  ordered parts = ordered::array();
  for (const auto& replica : replicas)
    if (replica.model == model.name && replica.version == model.version && !replica.parts.empty())
      parts.push_back(
          {{"replica", replica.number}, {"nodes", ordered::parse(replica.parts, nullptr, false)}});
  ordered told{{"name", model.name},
               {"version", model.version},
               {"last_inference", stats.last_ms},
               {"inference_count", stats.rows},
               {"execution_count", stats.batches},
               {"inference_stats",
                {{"success", duration(stats.success)},
                 {"fail", duration(stats.fail)},
                 {"queue", duration(stats.queue)},
                 {"compute_input", duration(stats.input)},
                 {"compute_infer", duration(stats.compute)},
                 {"compute_output", duration(stats.output)},
                 {"cache_hit", none},
                 {"cache_miss", none}}},
               {"response_stats", ordered::object()},
               {"batch_stats", batches},
               {"memory_usage", ordered::array()}};
  if (!parts.empty()) told["yoke_nodes"] = parts;
  return told;
}

constexpr const char* kVersion = YOKE_VERSION;

double to_us(Duration duration) { return double(duration.count()) / 1e3; }

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(Kind::Io, "cannot read '", path.string(), "'");
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_version(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos &&
         (text == "0" || !text.starts_with('0'));
}

bool listens_here_alone(const ServerConfig& serve) {
  return std::ranges::all_of(std::array{&serve.http, &serve.grpc, &serve.metrics},
                             [](auto* address) { return address->empty() || is_local(*address); });
}

// "10" is after "9".
bool is_older(const ModelConfig& one, const ModelConfig& other) {
  return std::pair(one.version.size(), one.version) <
         std::pair(other.version.size(), other.version);
}

}  // namespace

Duration time_to_take(size_t bytes, Duration idle, bool crowded) {
  constexpr size_t kSlowest = 1 << 10, kSlowestCrowded = 4 << 20;  // in each second
  const Duration first = crowded ? std::min<Duration>(idle, std::chrono::seconds(1)) : idle;
  return first + std::chrono::milliseconds(1000 * bytes / (crowded ? kSlowestCrowded : kSlowest));
}

Service::Service(const Config& config, const PoolOptions& options, observe::Log log,
                 observe::Registry& metrics, ServiceHooks hooks)
    : config_(config),
      local_(listens_here_alone(config.serve)),
      hooks_(std::move(hooks)),
      log_(std::move(log)),
      metrics_(metrics),
      tenants_(config.tenants),
      admin_keys_(config.serve.admin_key_sha256),
      access_log_(config.serve.access_log),
      pool_(options, log_, metrics) {
  for (const auto& model : config.models) pool_.load(model);
  pool_.set_tenants(config.tenants);  // who may have devices of those models for itself
}

Service::~Service() = default;

bool Service::any_keys() const {
  return !admin_keys_.empty() ||
         std::ranges::any_of(tenants_, [](const auto& one) { return !one.key_sha256.empty(); });
}

bool Service::has_keys() const {
  const MutexLock lock(mutex_);
  return any_keys();
}

Caller Service::identify(std::string_view key, std::string_view tenant, bool must_be_tenant,
                         bool by_page) const {
  const MutexLock lock(mutex_);
  const bool keys = any_keys();
  const std::string digest = key.empty() ? "" : sha256(key);
  Caller caller;
  for (const auto& admin : admin_keys_) caller.admin |= same_digest(digest, admin);
  const TenantConfig* found = nullptr;
  for (const auto& one : tenants_)
    if (!one.key_sha256.empty() && same_digest(digest, one.key_sha256)) found = &one;
  if (!key.empty() && keys && !found && !caller.admin)
    refuse(Status::Unauthenticated,
           "the key is not known: wanted one of a tenant of the config in '", kKeyHeader,
           ": KEY' or 'Authorization: Bearer KEY'; yoke serve key new makes one");
  if (!found && !tenant.empty() && (config_.serve.trust_tenant_header || caller.admin)) {
    const auto named = std::ranges::find(tenants_, tenant, &TenantConfig::name);
    if (named == tenants_.end())
      refuse(Status::Unauthenticated, "there is no tenant '", tenant, "'");
    found = &*named;
  }
  if (!found && !caller.admin) {
    if (keys && !config_.serve.trust_tenant_header)
      refuse(Status::Unauthenticated, "no key: wanted the header '", kKeyHeader,
             ": KEY' or 'Authorization: Bearer KEY'");
    // Without keys a request is of the one tenant that has none, if there is just one.
    const auto open = [](const auto& one) { return one.key_sha256.empty(); };
    const bool unclear = std::ranges::count_if(tenants_, open) > 1 || (keys && !tenants_.empty());
    if (unclear && must_be_tenant)
      refuse(Status::Unauthenticated, "whose request this is was not said: wanted the header '",
             config_.serve.trust_tenant_header ? kTenantHeader : kKeyHeader, "'");
    const auto one = std::ranges::find_if(tenants_, open);
    if (one != tenants_.end() && !unclear) found = &*one;
  }
  if (!found && caller.admin && keys && must_be_tenant && !tenants_.empty())
    refuse(Status::Unauthenticated, "an admin's key is no tenant's: say whose request it is by '",
           kTenantHeader, "'");
  if (!keys) caller.admin = local_ && !by_page && (tenants_.empty() || tenant.empty());
  caller.known = found || tenants_.empty();
  caller.name = found ? found->name : tenants_.empty() ? "default" : tenants_[0].name;
  try {
    caller.tenant = pool_.tenant(caller.name);
  } catch (const Error&) {  // reload() takes it away just now
    refuse(Status::Forbidden, "tenant '", caller.name, "' is no more");
  }
  return caller;
}

void Service::log_access(const Access& access) {
  const auto& answer = *access.answer;
  access_log_.write(
      observe::JsonObject({{"time", std::chrono::duration<double>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count()},
                           {"protocol", access.protocol},
                           {"id", answer.id},
                           {"traceparent", *access.traceparent},
                           {"tenant", *access.tenant},
                           {"model", answer.model},
                           {"replica", answer.replica},
                           {"batch", answer.batch},
                           {"queue_us", to_us(answer.timing.queue)},
                           {"compute_us", to_us(answer.timing.compute)},
                           {"status", status_name(answer.outcome.status)},
                           {"error", answer.outcome.text}})
          .text());
}

Pool::TicketPtr Service::submit(Request request, const Caller& caller, const char* protocol,
                                OnAnswer on_answer, OnText on_text, Pool::When when) {
  if (!access_log_.on())
    return pool_.submit(std::move(request), caller.tenant, std::move(on_answer), std::move(on_text),
                        when);
  auto logged = [this, protocol, tenant = caller.name, traceparent = request.traceparent,
                 then = std::move(on_answer)](Answer answer) {
    log_access({&answer, protocol, &tenant, &traceparent});
    then(std::move(answer));
  };
  return pool_.submit(std::move(request), caller.tenant, std::move(logged), std::move(on_text),
                      when);
}

void Service::log_refused(const Outcome& outcome, const RefusedRequest& request,
                          const char* protocol) {
  count_refused(metrics_, outcome.status);
  if (!access_log_.on()) return;
  Answer answer;
  answer.outcome = outcome;
  answer.model = request.model;
  answer.id = request.id;
  log_access({&answer, protocol, &request.tenant, &request.traceparent});
}

bool Service::ready() const { return !draining_ && pool_.ready(); }

ModelView Service::need_model(const std::string& name, const std::string& version) const {
  auto model = pool_.find(name, version);
  if (!model) pool_.refuse_unknown(name, version);
  return std::move(*model);
}

bool Service::model_ready(const std::string& name, const std::string& version) const {
  const auto model = pool_.find(name, version);
  if (!model)
    refuse(Status::NotFound, "there is no model '", name, "'",
           version.empty() ? "" : cat(" of version ", version));
  return model->state == ModelState::Ready && !draining_;
}

std::shared_ptr<const Facts> Service::facts(const std::string& name,
                                            const std::string& version) const {
  const auto model = need_model(name, version);
  if (!model.facts) refuse(Status::Unavailable, "model '", name, "' is not ready");
  return model.facts;
}

std::string Service::server_metadata() const {
  return ordered{{"name", "yoke"},
                 {"version", kVersion},
                 {"extensions",
                  {"model_repository", "model_repository(unload_dependents)", "model_configuration",
                   "binary_tensor_data", "parameters", "statistics", "sequence", "generate"}}}
      .dump();
}

std::string Service::model_metadata(const std::string& name, const std::string& version) const {
  const auto model = need_model(name, version);
  const auto facts = this->facts(name, version);
  json versions = json::array();
  for (const auto& one : pool_.view().models)
    if (one.name == name && (version.empty() || one.version == version) && one.facts)
      versions.push_back(one.version);
  return ordered{{"name", name},
                 {"versions", versions},
                 {"platform", facts->platform},
                 {"inputs", ports_of(facts->inputs)},
                 {"outputs", ports_of(facts->outputs)}}
      .dump();
}

std::string Service::model_config(const std::string& name, const std::string& version) const {
  const auto model = need_model(name, version);
  const auto facts = this->facts(name, version);
  int64_t count = 0;
  bool on_gpu = false;
  for (const auto& replica : pool_.view().replicas) {
    if (replica.model != name || replica.version != model.config.version) continue;
    ++count;
    on_gpu = replica.device.starts_with("cuda");
  }
  ordered config{{"name", name},
                 {"platform", facts->platform},
                 {"backend", "yoke"},
                 {"max_batch_size", facts->batch},
                 {"input", config_ports(*facts, facts->inputs)},
                 {"output", config_ports(*facts, facts->outputs)},
                 {"instance_group",
                  {{{"name", name}, {"count", count}, {"kind", on_gpu ? "KIND_GPU" : "KIND_CPU"}}}},
                 {"model_transaction_policy", {{"decoupled", false}}}};
  if (facts->stateful)
    config["sequence_batching"] = ordered::object();
  else if (facts->batch > 1)
    config["dynamic_batching"] = ordered::object();
  return config.dump();
}

void Service::check_admin(const Caller& caller, const char* what) const {
  if (caller.admin) return;
  const MutexLock lock(mutex_);
  refuse(Status::Forbidden, what, " needs an admin's key",
         admin_keys_.empty()
             ? ", and there is none: put a digest of 'yoke serve key new admin' into"
             : ": see",
         " serve.admin_key_sha256");
}

std::string Service::statistics(const std::string& name, const std::string& version,
                                const Caller& caller) const {
  check_admin(caller, "reading statistics of all tenants");
  if (!name.empty()) need_model(name, version);
  ordered list = ordered::array();
  const auto view = pool_.view();
  for (const auto& model : view.models)
    if (model.facts && (name.empty() || model.name == name) &&
        (version.empty() || model.version == version))
      list.push_back(stats_of(model, view.replicas));
  return ordered{{"model_stats", list}}.dump();
}

std::string Service::repository_index(bool only_ready) const {
  ordered list = ordered::array();
  std::set<std::string> there;
  for (const auto& model : pool_.view().models) {
    there.insert(model.name + "/" + model.version);
    if (only_ready && model.state != ModelState::Ready) continue;
    list.push_back({{"name", model.name},
                    {"version", model.version},
                    {"state", to_text(model.state)},
                    {"reason", model.reason}});
  }
  if (only_ready) return list.dump();
  for (const auto& name : loadable_names()) try {
      for (const auto& model : find_all(name))
        if (there.insert(name + "/" + model.version).second)
          list.push_back({{"name", name},
                          {"version", model.version},
                          {"state", "UNAVAILABLE"},
                          {"reason", "unloaded"}});
    } catch (const Refused&) {  // it only looks like one
    } catch (const Error&) {
    }
  return list.dump();
}

std::string Service::usage(const Caller& caller) const {
  if (!caller.admin && !caller.known)
    refuse(Status::Unauthenticated, "whose usage is asked for was not said: wanted the header '",
           config_.serve.trust_tenant_header ? kTenantHeader : kKeyHeader, "'");
  ordered list = ordered::array();
  for (const auto& tenant : pool_.view().tenants) {
    if (!caller.admin && tenant.name != caller.name) continue;
    ordered models = ordered::array();
    for (const auto& [name, usage] : tenant.by_model)
      models.push_back({{"model", name},
                        {"requests", usage.requests},
                        {"rows", usage.rows},
                        {"device_seconds", usage.device_s}});
    list.push_back({{"tenant", tenant.name},
                    {"active", tenant.active},
                    {"device_seconds", tenant.device_s},
                    {"borrowed_seconds", tenant.borrowed_s},
                    {"refused", tenant.refused},
                    {"models", models}});
  }
  return ordered{{"tenants", list}}.dump();
}

std::string Service::view(const Caller& caller) const {
  check_admin(caller, "the view of all tenants");
  const auto view = pool_.view();
  ordered models = ordered::array(), replicas = ordered::array(), tenants = ordered::array();
  for (const auto& model : view.models)
    models.push_back({{"name", model.name},
                      {"version", model.version},
                      {"state", to_text(model.state)},
                      {"reason", model.reason},
                      {"waiting", model.waiting},
                      {"rows", model.stats.rows},
                      {"batches", model.stats.batches},
                      {"requests", model.stats.success.count},
                      {"failed", model.stats.fail.count}});
  for (const auto& replica : view.replicas)
    replicas.push_back({{"replica", replica.number},
                        {"model", replica.model},
                        {"device", replica.device},
                        {"state", replica.state},
                        {"restarts", replica.restarts},
                        {"computing", replica.computing},
                        {"staged", replica.staged},
                        {"pid", replica.pid},
                        {"batches", replica.batches},
                        {"rows", replica.rows},
                        {"busy_s", std::chrono::duration<double>(replica.busy).count()}});
  for (const auto& tenant : view.tenants)
    if (tenant.active)
      tenants.push_back({{"name", tenant.name},
                         {"guaranteed", tenant.share.guaranteed},
                         {"ceiling", tenant.share.ceiling},
                         {"waiting", tenant.waiting},
                         {"device_s", tenant.device_s},
                         {"borrowed_s", tenant.borrowed_s},
                         {"refused", tenant.refused},
                         {"p50_ms", tenant.p50_ms},
                         {"p99_ms", tenant.p99_ms}});
  return ordered{
      {"ready", ready()},
      {"draining", draining_ || view.draining},
      {"devices", view.devices},
      {"time_s", std::chrono::duration<double>(SteadyClock().now().time_since_epoch()).count()},
      {"models", models},
      {"replicas", replicas},
      {"tenants", tenants}}
      .dump();
}

// NAME.pt, NAME.pt2, NAME/ with a model.toml or numbered versions or both, NAME/ that is a run or
// the like. A model.toml without a path is for all versions.
std::vector<ModelConfig> Service::find_in_folders(const std::string& name) const {
  namespace fs = std::filesystem;
  if (name.empty() || name.find('/') != name.npos || name.starts_with('.'))
    refuse(Status::Invalid, "'", name, "' is no name for a model");
  for (const auto& folder : config_.serve.models) {
    for (const auto* ending : {".pt", ".pt2"})
      if (fs::exists(fs::path(folder) / (name + ending)))
        return {{.name = name, .path = (fs::path(folder) / (name + ending)).string()}};
    const fs::path own = fs::path(folder) / name;
    if (!fs::is_directory(own)) continue;
    ModelConfig model;
    if (fs::exists(own / "model.toml")) {
      const auto config = parse_config(read_file(own / "model.toml"), own / "model.toml");
      if (config.models.size() != 1)
        refuse(Status::Invalid, "'", (own / "model.toml").string(), "' has ", config.models.size(),
               " [[model]] sections, wanted one");
      model = config.models[0];
    }
    model.name = name;
    if (!model.path.empty()) return {model};
    std::vector<ModelConfig> versions;
    for (const auto& entry : fs::directory_iterator(own)) {
      model.version = entry.path().filename().string();
      if (!is_version(model.version)) continue;
      for (const auto* file : {"model.pt", "model.pt2"})  // else it is not there yet, or no more
        if (fs::exists(entry.path() / file)) {
          model.path = (entry.path() / file).string();
          versions.push_back(model);
          break;
        }
    }
    std::ranges::sort(versions, is_older);
    if (!versions.empty()) return versions;
    model.version = "1";
    model.path = own.string();
    return {model};
  }
  refuse(Status::NotFound, "there is no model '", name,
         "' in the config as it was at the start, nor in the folders of serve.models");
}

std::set<std::string> Service::loadable_names() const {
  namespace fs = std::filesystem;
  std::set<std::string> names;
  for (const auto& model : config_.models) names.insert(model.name);
  std::error_code ignored;
  for (const auto& folder : config_.serve.models)
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      const auto ending = entry.path().extension();
      if (ending == ".pt" || ending == ".pt2")
        names.insert(entry.path().stem().string());
      else if (entry.is_directory(ignored))
        names.insert(entry.path().filename().string());
    }
  return names;
}

std::vector<ModelConfig> Service::find_all(const std::string& name) const {
  std::vector<ModelConfig> found;
  std::ranges::copy_if(config_.models, std::back_inserter(found),
                       [&](const auto& model) { return model.name == name; });
  return found.empty() ? find_in_folders(name) : found;
}

void Service::load(const std::string& name, const std::string& parameters, const Caller& caller) {
  check_admin(caller, "loading a model");
  const json given = parameters.empty() ? json::object() : json::parse(parameters, nullptr, false);
  const auto wanted = find_all(name);
  if (!given.is_object()) refuse(Status::Invalid, "the body: wanted a JSON object or nothing");
  if (given.contains("parameters") && !given.at("parameters").empty())
    refuse(Status::Unsupported,
           "a model is loaded as the config or its model.toml says; no "
           "parameters are taken");
  for (auto model : wanted) try {
      if (hooks_.prepare) hooks_.prepare(model);
      pool_.load_and_wait(model, Duration(int64_t(config_.serve.start_s * 1e9)));
      log_.info("a model was loaded", {{"model", name}, {"version", model.version}});
    } catch (const Error& error) {
      refuse(error.kind() == Kind::Timeout ? Status::Unavailable : Status::Invalid,
             "failed to load '", name, "' of version ", model.version, ": ", error.what());
    }
  for (const auto& model : pool_.view().models)
    if (model.name == name && !std::ranges::count(wanted, model.version, &ModelConfig::version) &&
        pool_.unload(name, model.version))
      log_.info("a model was unloaded", {{"model", name}, {"version", model.version}});
}

void Service::unload(const std::string& name, const Caller& caller) {
  check_admin(caller, "unloading a model");
  if (!pool_.unload(name)) pool_.refuse_unknown(name);
  log_.info("a model was unloaded", {{"model", name}});
}

void Service::reload(const Caller& caller) {
  check_admin(caller, "changing the tenants");
  try {
    reload();
  } catch (const std::exception& error) {
    refuse(Status::Invalid, "the tenants stay as they are: ", error.what());
  }
}

void Service::reload() {
  if (!hooks_.reread) fail(Kind::Config, "the server was started without a config to read again");
  const MutexLock one_at_a_time(reloading_);
  const Config config = hooks_.reread();
  check(config);
  pool_.set_tenants(config.tenants);
  {
    const MutexLock lock(mutex_);
    tenants_ = config.tenants;
    admin_keys_ = config.serve.admin_key_sha256;
  }
  log_.info("tenants and keys were read again", {{"tenants", config.tenants.size()}});
}

}  // namespace yoke::serve
