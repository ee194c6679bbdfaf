// SPDX-License-Identifier: Apache-2.0
// The inside of a pool. Everything below the mutex; what leaves (answers, logs) is collected in an
// Outbox and goes out when the mutex is free. pool.cpp: tenants and requests, pool_models.cpp and
// pool_view.cpp beside it. dispatch.cpp: who computes what. watch.cpp: what wakes it, with
// lives.cpp for workers and done.cpp for batches.
#pragma once

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "yoke/base/mutex.h"
#include "yoke/observe/metrics.h"
#include "yoke/serve/batch_trace.h"
#include "yoke/serve/channel.h"
#include "yoke/serve/control.h"
#include "yoke/serve/pool.h"

namespace yoke::serve {

constexpr size_t kCopyUnlocked = 64 << 10;  // bytes from which on copying does not hold the mutex

constexpr Duration kQuick = std::chrono::seconds(5);  // a worker that ends sooner was not healthy
constexpr int kGivenUp = 4;  // quick deaths of a worker in a row, after which nobody waits for it
// What the watching thread is woken by, beside workers, which have their numbers.
constexpr uint64_t kWake = UINT64_MAX, kTimer = UINT64_MAX - 1;

// Of latencies, in milliseconds.
inline std::vector<double> latency_bounds() { return observe::exponential_bounds(0.1, 2, 16); }

struct Seat;
struct Model;
struct Hosted;

// What a client's requests have in common that go to one instance of a model with state.
struct Sequence {
  Hosted* hosted = nullptr;  // the replica that has it
  int tenant = 0;
  size_t in_flight = 0;  // requests without an answer
  Time used = {};        // when one was answered last
};

// A request on its way.
class Pool::Ticket {
 public:
  Request request = {};
  std::shared_ptr<Model> model = {};
  int tenant = 0;
  OnAnswer on_answer = {};
  OnText on_text = {};
  uint64_t number = 0;  // in the order of arrival
  Time arrival = {};
  std::optional<Time> deadline = {};
  int64_t rows = 0;    // of the request; 1 where it has none
  uint64_t bytes = 0;  // of its inputs
  struct Rows {
    int64_t from = 0, count = 0;
  };
  std::deque<Rows> todo = {};  // that no batch has
  int64_t rows_done = 0;
  std::map<int64_t, std::vector<std::string>> pieces = {};  // outputs, by their first row
  uint64_t row_key = 0;                                     // of its first row in slabs
  bool alone = false;  // was in a worker that died: not with others again
  bool queued = false, answered = false;
  bool counted = false;        // among those of its tenant without an answer
  std::string shape_key = {};  // requests with the same may share a batch
  std::string stream = {};
  size_t text_seen = 0;
  int texts = 0;  // pieces on their way: the answer follows them
  // Where it failed, as others did before it: it is tried elsewhere, which tells whose fault it is.
  std::shared_ptr<Hosted> doubts = {};
  std::shared_ptr<Sequence> sequence = {};  // of a model with state
  Answer answer = {};
};
using Ticket = Pool::Ticket;
using TicketPtr = Pool::TicketPtr;

// Its rows are not to be apart, nor with others'.
inline bool is_whole(const Request& request, const Facts& facts) {
  return request.prompt || facts.batch == 0 ||
         std::ranges::count(request.inputs, Type::Bytes, &Tensor::type) > 0;
}

// Some rows of a request within a batch.
struct Entry {
  TicketPtr ticket = {};
  int64_t from = 0, rows = 0;  // of the request
  uint32_t at = 0;             // in the batch
  FairShare::Turn turn = {};
};

struct Batch {
  std::shared_ptr<Hosted> hosted = {};
  std::shared_ptr<Channel> channel = {};
  int slab = 0;
  std::shared_ptr<Model> model = {};
  std::string shape_key = {};
  uint32_t rows = 0, capacity = 1;
  std::vector<Entry> entries = {};
  bool full = false;  // takes no more
  int only = -1;      // the one tenant whose rows it takes
  bool published = false, lost = false;
  bool suspect = false;  // its request may have killed a worker
  Time at = {};          // when it could begin
  bool sealed = false;   // when it was last looked at
  uint64_t progress = 0;
  Time progress_at = {};
  SlabHeader& header() const { return *channel->slab(slab).header; }
};
using BatchPtr = std::shared_ptr<Batch>;

// A replica's place: it stays when the worker is replaced.
struct Hosted : std::enable_shared_from_this<Hosted> {
  int number = 0;
  std::shared_ptr<Model> model = {};
  Seat* seat = nullptr;
  ReplicaSpec spec = {};
  std::unique_ptr<Replica> worker = {};
  enum class State { Starting, Ready, Dead } state = State::Dead;
  Time since = {}, start_at = {};
  int restarts = 0, quick_deaths = 0;
  int failures = 0;               // of batches, in a row
  int guilt = 0;                  // of those, what worked elsewhere
  std::set<int> failed_for = {};  // tenants of those failures
  std::string said = {};          // why it ends
  std::string parts = {};         // what it tells of its parts, as JSON
  std::string more_parts = {};    // as far as they have come
  int next_slab = 0;
  std::array<bool, Channel::kSlabs> used = {};
  uint64_t batches = 0, rows = 0;
  Duration busy = {};
  size_t sequences = 0;
};

// A device of the pool, or one of the parts it was cut into. It is there as long as a model is.
struct Seat {
  std::string name = {};
  int owner = -1;  // the tenant that has it for itself
  std::vector<Hosted*> hosted = {};
  BatchPtr first = {}, second = {};
  bool filling = false;
  BatchPtr filled = {};
  bool is_shared() const {  // and there is someone to compute
    const auto is_ready = [](const Hosted* one) { return one->state == Hosted::State::Ready; };
    return owner < 0 && std::ranges::any_of(hosted, is_ready);
  }
};

// Of its metrics, which go with it.
observe::Labels labels_of(const Hosted& hosted);

struct Model {
  ModelConfig config = {};
  ModelState state = ModelState::Loading;
  std::string reason = {};
  std::shared_ptr<const Facts> facts = {};
  ModelStats stats = {};
  double row_ns = 1e6;  // what a row costs, lately
  struct Seen {
    double batch_ns = 0, row_ns = 0;  // the longest, lately
    uint64_t out = 0;                 // bytes of a row's outputs, the most
    uint32_t fit = UINT32_MAX;        // rows whose outputs have room together
  };
  std::map<std::string, Seen> seen = {};  // by shape
  const std::string& seen_as(const std::string& shape_key) const {
    static const std::string kAll;
    return one_shape ? kAll : shape_key;
  }
  bool one_shape = false, given_up = false;
  bool awaited = false;  // the pool is not ready before it is
  size_t in_flight = 0;  // requests without an answer
  std::map<std::string, std::shared_ptr<Sequence>> sequences = {};  // by tenant/name
  std::map<int, size_t> sequences_of = {};                          // how many, by tenant
  // Each holds the model in turn, until it is gone and this is cleared.
  std::vector<std::shared_ptr<Hosted>> hosted = {};
  observe::Counter *success = nullptr, *rejected = nullptr, *cancelled = nullptr, *failed = nullptr,
                   *rows = nullptr, *batches = nullptr, *request_us = nullptr, *queue_us = nullptr,
                   *input_us = nullptr, *compute_us = nullptr, *output_us = nullptr;
  observe::Gauge* pending = nullptr;
  observe::Histogram *latency = nullptr, *batch_rows = nullptr;
  std::string key() const { return config.name + "/" + config.version; }
  void leave(const Sequence& sequence) {  // which is then forgotten
    --sequence.hosted->sequences;
    --sequences_of[sequence.tenant];
  }
};

struct Tenant {
  TenantConfig config = {};
  bool active = true;
  // By model, in the order of priority and arrival.
  using Queue = std::map<std::pair<uint64_t, uint64_t>, TicketPtr>;
  std::map<Model*, Queue> queues = {};
  size_t waiting = 0;  // requests without an answer, and the bytes of their inputs
  uint64_t waiting_bytes = 0;
  uint64_t last_turn = 0;  // with the policy round_robin
  uint64_t refused = 0;
  std::map<std::string, Usage> usage = {};
  std::deque<double> latest_ms = {};
  observe::Counter *device_s = nullptr, *borrowed_s = nullptr, *requests = nullptr,
                   *refusals = nullptr;
  observe::Gauge* pending = nullptr;
  observe::Histogram* latency = nullptr;
};

struct Stream {
  std::deque<TicketPtr> order = {};
  bool delivering = false;
};

// What is to be done when the mutex is free.
struct Outbox {
  std::vector<std::function<void(const observe::Log&)>> lines = {};
  std::vector<TicketPtr> answers = {};
  std::vector<std::string> streams = {};
  struct Text {
    TicketPtr ticket;
    OnText on_text;
    std::string text;
  };
  std::vector<Text> texts = {};
};

class Pool::Impl {
 public:
  Impl(const PoolOptions& options, observe::Log log, observe::Registry& metrics);
  ~Impl();

  const PoolOptions options_;
  const observe::Log log_;
  observe::Registry& metrics_;
  SteadyClock clock_;
  mutable Mutex mutex_;
  Condition changed_;  // models, and requests that were answered
  bool accepting_ = true;
  std::map<std::string, std::shared_ptr<Model>> models_;  // by name/version: those that serve
  std::vector<std::shared_ptr<Model>> coming_, going_;    // not yet, and no more
  std::list<Seat> seats_;
  std::vector<std::unique_ptr<Tenant>> tenants_;
  std::map<std::string, Stream> streams_;
  std::multimap<Time, TicketPtr> deadlines_;
  FairShare share_{0};
  uint64_t turns_ = 0;  // of the policy round_robin
  BatchTrace trace_;
  uint64_t next_number_ = 1, next_row_key_;
  int next_replica_ = 0;
  size_t waiting_ = 0;            // requests without an answer
  size_t queued_ = 0;             // with rows that no batch has
  std::optional<Time> retry_at_;  // when a tenant at its limit may go on

  // pool.cpp
  void count_in(Ticket& ticket);
  void count_out(Ticket& ticket);
  void admit(const TicketPtr& ticket);                 // throws Refused
  std::string owned_places(const Model& model) const;  // for people
  static std::string sequence_key(int tenant, const Parameters& parameters);
  void join_sequence(Ticket& ticket);                     // likewise
  Hosted& place_of_sequence(const Ticket& ticket) const;  // likewise
  void enqueue(const TicketPtr& ticket);
  void check_owners(const std::vector<TenantConfig>& tenants) const;  // throws Kind::Config
  void set_owners();
  void answer_stranded(Outbox& outbox);
  void answer(const TicketPtr& ticket, Outcome outcome, Outbox& outbox);
  void send(Outbox& outbox);  // without the mutex

  // pool_models.cpp
  std::shared_ptr<Model> load(const ModelConfig& config, bool awaited);
  const Model* awaited() const;  // one that is not ready yet
  void place(const std::shared_ptr<Model>& model);
  std::shared_ptr<Model> find(const std::string& name, const std::string& version) const;
  std::shared_ptr<Model> find_for(const Request& request, int tenant) const;
  std::vector<std::shared_ptr<Model>> with_sequences() const;  // those that go, too
  std::shared_ptr<Model> find_coming(const std::string& name, const std::string& version) const;

  // pool_view.cpp
  void count(const Ticket& ticket);
  ModelView view_of(const Model& model) const;
  size_t waiting_for(const Model& model) const;

  // dispatch.cpp
  void pump();
  bool may_use(int tenant, const Seat& seat) const;
  bool may_try(const Model& model) const;
  bool may_go_elsewhere(const Ticket& ticket, const Hosted& from) const;
  TicketPtr next_of(int tenant, const Seat& seat, const Batch* with) const;
  bool fill(Seat& seat, BatchPtr batch);
  BatchPtr open_batch(Seat& seat, const Ticket& first);
  bool steal_for(Seat& seat);
  bool make_way(Seat& seat);
  bool withdraw(Seat& seat);
  void requeue(Entry& entry);
  void publish(Seat& seat, const BatchPtr& batch, std::vector<Entry> added);
  FairShare::Turn pick_otherwise(const Seat& seat, const Batch* with,
                                 const std::vector<int>& waiting);
  std::optional<FairShare::Turn> pick(Seat& seat, const Batch* with, int idle);
  Time free_at(const Seat& seat) const;
  Hosted* ready_on(const Seat& seat, const Model& model) const;
  void remove_from_queue(const Ticket& ticket);

  // lives.cpp
  void start(Hosted& hosted);
  void dismiss(Hosted& hosted);
  void retire(std::shared_ptr<Model> model);
  void became_ready(Hosted& hosted, const std::string& facts, Outbox& outbox);
  void died(Hosted& hosted, const std::string& why, Outbox& outbox);
  void give_back(Seat& seat, BatchPtr& batch, Outbox& outbox);
  Outcome unhealthy(const Model& model) const;
  void heard(Hosted& hosted, Outbox& outbox);
  void count_devices();

  // done.cpp
  void promote(Seat& seat);
  void take_done(Outbox& outbox);
  static void check_header(const Batch& batch);
  static std::vector<std::string> copy_outputs(const Batch& batch, const Entry& entry);
  void take_rows(const Batch& batch, Entry& entry, std::vector<std::string> outputs,
                 Outbox& outbox);
  void take_text(const Batch& batch, Outbox& outbox);
  bool try_elsewhere(const Batch& batch, Entry& entry);
  void judge(Ticket& ticket, bool works);
  static void eject(Hosted& hosted, const std::string& why);
  static void learn(const Batch& batch, Duration time);
  void account(const Batch& batch);
  void free_slab(const Batch& batch);

  // watch.cpp
  void watch_once(int timeout_ms);
  void look_by(Time time);  // the watching thread looks around then, or before
  void listen(int file, uint64_t what) const;
  Time stuck_at(Batch& batch) const;
  void forget_idle_sequences(Time now);
  Time look_around(Outbox& outbox);  // when to look again
  void wake();

  net::Descriptor epoll_, wake_, timer_;
  Time timer_at_ = Time::max();
  std::vector<std::pair<Time, std::unique_ptr<Replica>>> leaving_;  // workers that end, since when
  std::vector<Hosted*> all_hosted_;
  Time sequences_at_ = {};  // when idle ones are looked for again
  std::jthread watcher_;
};

}  // namespace yoke::serve
