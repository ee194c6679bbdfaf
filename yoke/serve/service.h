// SPDX-License-Identifier: Apache-2.0
// What `yoke serve` offers, whatever the protocol: who may ask what, models and their descriptions,
// requests, the repository, statistics. REST and gRPC are fronts of this. Descriptions are JSON, as
// REST gives them; gRPC's messages have the same fields and are read from it.
// Threads: any. All that is refused is thrown as Refused.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/serve/access_log.h"
#include "yoke/serve/errands.h"
#include "yoke/serve/pool.h"

namespace yoke::serve {

inline constexpr const char* kKeyHeader = "yoke-key";        // or "authorization: Bearer KEY"
inline constexpr const char* kTenantHeader = "yoke-tenant";  // with trust_tenant_header

// That a client has to take an answer; where answers that nobody takes fill the memory, all but
// those who read fast make room.
Duration time_to_take(size_t bytes, Duration idle, bool crowded);

struct Caller {
  int tenant = 0;
  std::string name = {};
  bool admin = false;
  bool known = false;  // it is clear which tenant it is
};

// What the service asks of whoever made it.
struct ServiceHooks {
  std::function<Config()> reread = {};  // the config anew, for reload()
  // Completes what the config of a model leaves open before it is loaded at run time, and throws
  // where its devices have no room for it.
  std::function<void(ModelConfig&)> prepare = {};
};

// What is known of a request that never reached the pool.
struct RefusedRequest {
  std::string model = {}, id = {}, tenant = {}, traceparent = {};
};

class Service {
 public:
  // Begins to load the models of the config.
  Service(const Config& config, const PoolOptions& options, observe::Log log,
          observe::Registry& metrics, ServiceHooks hooks = {});
  ~Service();

  // `key` as it came, without "Bearer "; both empty where there are none. `must_be_tenant`: it
  // wants something computed, so it must be clear for whom. Without a key is an admin who names no
  // tenant, where nobody has one and this host alone can ask; but not `by_page`, as a browser here
  // asks for whoever made the page.
  Caller identify(std::string_view key, std::string_view tenant, bool must_be_tenant = true,
                  bool by_page = false) const;
  void check_admin(const Caller& caller, const char* what) const;
  bool has_keys() const;  // anybody, tenants or admins

  // As Pool's, with a line in the access log when it is answered. `protocol` is "http" or "grpc".
  Pool::TicketPtr submit(Request request, const Caller& caller, const char* protocol,
                         OnAnswer on_answer, OnText on_text = {},
                         Pool::When when = Pool::When::Now);
  void cancel(const Pool::TicketPtr& ticket) { pool_.cancel(ticket); }
  // Counts what never became a request of the pool, with a line in the access log.
  void log_refused(const Outcome& outcome, const RefusedRequest& request, const char* protocol);

  bool ready() const;
  bool draining() const { return draining_; }
  // Throws NotFound where there is no such model; it says no more, as anybody may ask.
  bool model_ready(const std::string& name, const std::string& version) const;
  std::shared_ptr<const Facts> facts(const std::string& name, const std::string& version) const;

  // JSON. An empty version is the newest that is ready.
  std::string server_metadata() const;
  std::string model_metadata(const std::string& name, const std::string& version) const;
  std::string model_config(const std::string& name, const std::string& version) const;
  // {"model_stats":[…]}; an empty name is all models.
  std::string statistics(const std::string& name, const std::string& version,
                         const Caller& caller) const;
  std::string repository_index(bool only_ready) const;  // [{"name",…},…]
  std::string usage(const Caller& caller) const;        // of the caller, or of all for an admin
  std::string view(const Caller& caller) const;         // for `yoke top`; admins only
  // By an admin. load() takes all versions that the config has of the model, or that are in its
  // folder now, and unloads others of that name. It returns when they are ready, and throws with
  // the reason where one fails.
  void load(const std::string& name, const std::string& parameters_json, const Caller& caller);
  void unload(const std::string& name, const Caller& caller);
  // Takes the tenants and keys of the config anew, admins' too; one after the other, so it may wait
  // until another has read the file.
  void reload(const Caller& caller);
  void reload();

  // Not ready from now on, though requests are taken still.
  void begin_drain() { draining_ = true; }
  Pool& pool() { return pool_; }
  Errands& errands() { return errands_; }  // where load() and unload() are called from
  const Config& config() const { return config_; }

 private:
  bool any_keys() const YOKE_REQUIRES(mutex_);
  struct Access {
    const Answer* answer;
    const char* protocol;
    const std::string *tenant, *traceparent;
  };
  void log_access(const Access& access);
  ModelView need_model(const std::string& name, const std::string& version) const;
  std::vector<ModelConfig> find_in_folders(const std::string& name) const;
  std::set<std::string> loadable_names() const;
  std::vector<ModelConfig> find_all(const std::string& name) const;  // versions that load() takes

  const Config config_;
  const bool local_;  // this host alone can ask
  const ServiceHooks hooks_;
  const observe::Log log_;
  observe::Registry& metrics_;
  Mutex reloading_;  // else the pool may have one's tenants, and we the keys of another's
  mutable Mutex mutex_;
  std::vector<TenantConfig> tenants_ YOKE_GUARDED_BY(mutex_);
  std::vector<std::string> admin_keys_ YOKE_GUARDED_BY(mutex_);  // their digests
  std::atomic<bool> draining_{false};
  AccessLog access_log_;
  Pool pool_;
  Errands errands_;
};

}  // namespace yoke::serve
