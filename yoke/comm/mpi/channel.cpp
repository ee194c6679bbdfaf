// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/mpi/channel.h"

#include <mpi.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "yoke/base/text.h"

namespace yoke::comm {
namespace {

// MPI counts in int.
constexpr size_t kMaxBytes = size_t{1} << 30;

void must(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(Kind::Comm, call, ": ", std::string_view(text, size_t(length)));
}

// MPI can be started only once in a process, so this is the process's, and not a world's.
class Runtime {
 public:
  static Runtime& get() {
    static Runtime runtime;
    return runtime;
  }

  // MPI calls are made under it. Where MPI lets threads in by itself it locks nothing.
  std::unique_lock<Mutex> entry() {
    return level_ < MPI_THREAD_MULTIPLE ? std::unique_lock(mutex_) : std::unique_lock<Mutex>();
  }

  // Ending MPI waits for all processes, and one that has failed may not come.
  void never_finalize() { finalize_ = false; }
  void never_finalize_after_failure_of(const std::shared_ptr<World>& world) {
    watch_ = world->on_change([this, weak = std::weak_ptr(world)] {
      if (const auto held = weak.lock(); held && held->failed()) never_finalize();
    });
  }

  void keep(std::shared_ptr<void> memory) {
    never_finalize();
    MutexLock lock(mutex_);
    // Leaked on purpose: MPI writes until the last moment, static destructors come before.
    static auto& kept = *new std::vector<std::shared_ptr<void>>;
    kept.push_back(std::move(memory));
  }

 private:
  Runtime() {
    int started = 0;
    MPI_Initialized(&started);
    finalize_ = !started;
    if (started)
      MPI_Query_thread(&level_);
    else
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level_);
  }
  ~Runtime() {
    int ended = 0;
    MPI_Finalized(&ended);
    if (finalize_ && !ended) MPI_Finalize();
  }

  int level_ = MPI_THREAD_SINGLE;
  Mutex mutex_;
  std::atomic<bool> finalize_{false};
  std::shared_ptr<void> watch_;
};

}  // namespace

struct MpiTransfers::Request {
  MPI_Request request = MPI_REQUEST_NULL;
  int to_come = -1;  // bytes; -1 for a send
};

MpiTransfers::MpiTransfers() = default;
MpiTransfers::~MpiTransfers() = default;

bool MpiTransfers::done() {
  while (!requests_.empty()) {
    auto& [request, to_come] = requests_.back();
    int passed = 0, came = 0;
    MPI_Status status;
    const auto entry = Runtime::get().entry();
    must(MPI_Test(&request, &passed, &status), "MPI_Test");
    if (!passed) return false;
    if (to_come >= 0) {
      must(MPI_Get_count(&status, MPI_BYTE, &came), "MPI_Get_count");
      if (came != to_come)
        fail(Kind::Comm, "rank ", status.MPI_SOURCE, " sent ", came, " bytes where ", to_come,
             " were expected; run.check tells which calls do not fit together");
    }
    requests_.pop_back();
  }
  return true;
}

struct MpiChannel::Impl {
  MPI_Comm communicator = MPI_COMM_NULL;
  int max_tag = 32767;  // what every MPI allows

  template <typename Start>
  void in_chunks(Bytes bytes, bool receives, std::vector<MpiTransfers::Request>& requests,
                 Start start) const {
    const auto entry = Runtime::get().entry();
    do {
      const auto chunk = bytes.first(std::min(bytes.size(), kMaxBytes));
      bytes = bytes.subspan(chunk.size());
      auto& added = requests.emplace_back();
      if (receives) added.to_come = int(chunk.size());
      must(start(chunk.data(), int(chunk.size()), &added.request),
           receives ? "MPI_Irecv" : "MPI_Isend");
    } while (!bytes.empty());
  }
};

MpiChannel::MpiChannel() : impl_(std::make_unique<Impl>()) {}

std::shared_ptr<MpiChannel> MpiChannel::open(const std::shared_ptr<World>& world) {
  const int me = world->first_here();
  int size = 0, rank = 0;
  {
    const auto entry = Runtime::get().entry();
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  }
  if (size != world->size() || rank != me)
    fail(Kind::Usage, "this process is rank ", me, " of ", world->size(), ", but MPI has it as ",
         rank, " of ", size, "; start one process for each rank with MPI's own launcher (mpirun)");
  Runtime::get().never_finalize_after_failure_of(world);

  std::shared_ptr<MpiChannel> channel(new MpiChannel);
  MpiTransfers opening;
  auto& request = opening.requests_.emplace_back().request;
  {
    const auto entry = Runtime::get().entry();
    must(MPI_Comm_idup(MPI_COMM_WORLD, &channel->impl_->communicator, &request), "MPI_Comm_idup");
  }
  const Time deadline = SteadyClock().now() + world->timeout();
  while (!opening.done()) {
    if (SteadyClock().now() >= deadline)
      world->fail(me, Kind::Timeout,
                  cat("rank ", me, " waited ", duration_text(world->timeout()),
                      " (run.timeout_s) for the other processes to connect over MPI"));
    if (world->failed()) {
      keep_for_mpi(channel);
      world->raise(me);
    }
    std::this_thread::yield();
  }
  const auto entry = Runtime::get().entry();
  const MPI_Comm communicator = channel->impl_->communicator;
  must(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  void* bound = nullptr;
  int found = 0;
  must(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found), "MPI_Comm_get_attr");
  if (found) channel->impl_->max_tag = *static_cast<int*>(bound);
  return channel;
}

MpiChannel::~MpiChannel() {
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended || impl_->communicator == MPI_COMM_NULL) return;
  const auto entry = Runtime::get().entry();
  MPI_Comm_free(&impl_->communicator);
}

int MpiChannel::max_tag() const { return impl_->max_tag; }

void MpiChannel::send(int to, int tag, Bytes bytes, MpiTransfers& transfers, Until until) const {
  const auto start = until == Until::Taken ? &MPI_Issend : &MPI_Isend;
  impl_->in_chunks(bytes, false, transfers.requests_, [&](void* data, int size, MPI_Request* r) {
    return start(data, size, MPI_BYTE, to, tag, impl_->communicator, r);
  });
}

void MpiChannel::recv(int from, int tag, Bytes bytes, MpiTransfers& transfers) const {
  impl_->in_chunks(bytes, true, transfers.requests_, [&](void* data, int size, MPI_Request* r) {
    return MPI_Irecv(data, size, MPI_BYTE, from, tag, impl_->communicator, r);
  });
}

void keep_for_mpi(std::shared_ptr<void> memory) { Runtime::get().keep(std::move(memory)); }

std::string share_over_mpi(const std::string& text) {
  std::string shared = text;
  const auto entry = Runtime::get().entry();
  uint64_t size = shared.size();
  must(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD), "MPI_Bcast");
  shared.resize(size);
  must(MPI_Bcast(shared.data(), int(size), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
  return shared;
}

}  // namespace yoke::comm
