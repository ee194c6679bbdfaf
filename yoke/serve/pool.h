// SPDX-License-Identifier: Apache-2.0
// Replicas of models on a pool of devices, and the requests of many tenants for them. A device has
// one batch that computes and at most one that is staged. When it can take work the tenant is
// chosen, then its oldest request, then the batch is formed of whatever fits with it; a staged
// batch takes more rows until its worker begins, and goes to another device that falls idle sooner.
//
// Every request that submit() takes is answered exactly once, by success, error, deadline or cancel
// alike; those of one stream in the order in which they came.
// Owns: the workers and one thread that watches them, or whoever calls watch_once() does. Threads:
// all functions from any; answers come on the caller's thread (refusals) or the watching one, and
// must not block.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "yoke/observe/log.h"
#include "yoke/observe/metrics.h"
#include "yoke/serve/config.h"
#include "yoke/serve/facts.h"
#include "yoke/serve/replica.h"
#include "yoke/serve/request.h"

namespace yoke::topo {
struct Host;
}

namespace yoke::serve {

struct PoolOptions {
  WorkerKind workers = {};
  uint64_t slab_bytes = 1ul << 30;
  uint64_t max_queue_bytes = 1ul << 30;  // of inputs that one tenant has waiting
  bool poison = false;
  std::string policy = "fair";  // as serve.policy
  size_t trace = 0;             // batches of which the times are kept
  bool own_thread = true;       // that watches; else someone calls watch_once()
  Duration start_timeout = std::chrono::seconds(120);
  Duration stuck_floor = std::chrono::seconds(10);  // no batch is taken for stuck before
  const topo::Host* host = nullptr;                 // what `auto` means, and its cores
};

enum class ModelState { Loading, Ready, Unavailable, Unloading };
const char* to_text(ModelState state);  // "READY"

struct StatDuration {
  uint64_t count = 0;
  Duration time = {};
  void add(Duration more) { ++count, time += more; }
};

struct ModelStats {
  uint64_t last_ms = 0;  // since 1970
  uint64_t rows = 0, batches = 0;
  StatDuration success = {}, fail = {}, queue = {}, input = {}, compute = {}, output = {};
  struct Batch {
    StatDuration input = {}, compute = {}, output = {};
  };
  std::map<int64_t, Batch> by_rows = {};
};

struct ReplicaView {
  int number = 0;
  std::string model = {}, device = {}, state = {};
  int restarts = 0;
  int computing = 0, staged = 0;  // rows
  size_t sequences = 0;
  pid_t pid = 0;
  uint64_t batches = 0, rows = 0;
  Duration busy = {};
  std::string version = {};  // of the model
  std::string parts = {};    // what each part of it has computed, as JSON; empty: it has none
};

struct ModelView {
  std::string name = {}, version = {};
  ModelState state = ModelState::Loading;
  std::string reason = {};
  std::shared_ptr<const Facts> facts = {};  // null until a replica is ready
  ModelConfig config = {};
  ModelStats stats = {};
  size_t waiting = 0;
};

struct Usage {
  uint64_t requests = 0, rows = 0;
  double device_s = 0;
};

struct TenantView {
  std::string name = {};
  Share share = {};
  size_t waiting = 0;  // requests without an answer yet
  double device_s = 0, borrowed_s = 0;
  std::map<std::string, Usage> by_model = {};
  uint64_t refused = 0;
  double p50_ms = 0, p99_ms = 0;  // of the latest answers
  bool active = true;             // else it was taken away, and is told of for what it used
};

struct PoolView {
  bool ready = false, draining = false;
  int devices = 0;
  std::vector<ModelView> models = {};
  std::vector<ReplicaView> replicas = {};
  std::vector<TenantView> tenants = {};
};

// A request that did not come as far as a model.
void count_refused(observe::Registry& metrics, Status status);

class Pool {
 public:
  // A request on its way.
  class Ticket;
  using TicketPtr = std::shared_ptr<Ticket>;

  Pool(const PoolOptions& options, observe::Log log, observe::Registry& metrics);
  ~Pool();

  // Those there are stay themselves by name; who is missing takes no more requests. Throws
  // Kind::Config where a tenant's own devices have no models, or too few parts of them.
  void set_tenants(const std::vector<TenantConfig>& tenants);
  // The number of one; throws Kind::Usage where there is none.
  int tenant(const std::string& name) const;

  // Begins to load; a model of that name and version goes on until the new one is ready, and is
  // then unloaded. Throws Kind::Config where it cannot be placed.
  void load(const ModelConfig& model);
  // The same, until it is ready; throws the reason where it fails, and it is as if never asked for.
  void load_and_wait(const ModelConfig& model, Duration timeout);
  // False where there is none. Requests that it has are finished first.
  bool unload(const std::string& name, const std::string& version = "");
  // Until all models of load() are ready or one has failed, whose reason is thrown, Kind::Config.
  void wait_ready(Duration timeout);
  bool all_loaded() const;     // at this moment
  void check_loading() const;  // throws as wait_ready() does

  // Later: more requests follow at once, and devices get them when dispatch() is called, so that
  // the first one of many does not go alone.
  enum class When { Now, Later };
  TicketPtr submit(Request request, int tenant, OnAnswer on_answer, OnText on_text = {},
                   When when = When::Now);
  void dispatch();
  void cancel(const TicketPtr& ticket);

  // Without a thread of its own: readable when there is something to do, which watch_once() does,
  // always in the same thread. -1 with one.
  int watch_file() const;
  void watch_once();

  // No more requests are taken; true when all have been answered before `deadline`.
  void stop_accepting();
  bool drain(Time deadline);

  PoolView view() const;
  std::string trace() const;  // of the last batches, as JSON
  // Of an empty version the newest that is ready.
  std::optional<ModelView> find(const std::string& name, const std::string& version = "") const;
  // Throws Refused, which says what there is.
  [[noreturn]] void refuse_unknown(const std::string& name, const std::string& version = "") const;
  bool ready() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::serve
