// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/run_ranks.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/comm/local/backend.h"
#include "yoke/comm/local/cuda_lane.h"

namespace yoke::comm {
namespace {

// More ranks than this are not listed one by one in an error.
constexpr size_t kMaxListed = 8;

// Ties the calling thread, and the threads it will start, to the rank's part of the allowed cores.
void pin_to_cores(int rank, int num_ranks) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < num_ranks)
    return;
  const int each = CPU_COUNT(&allowed) / num_ranks;
  cpu_set_t mine;
  CPU_ZERO(&mine);
  for (int cpu = 0, place = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && place++ / each == rank) CPU_SET(cpu, &mine);
  sched_setaffinity(0, sizeof mine, &mine);
}

// cuDNN makes a plan of its attention in every new thread and loads it, and loading waits for what
// runs on the GPUs of this process: also for a peer's operation, which waits for this very rank.
// The other kinds of attention are there from the start.
class NoLateKernels {
 public:
  explicit NoLateKernels(bool several)
      : cudnn_(several && at::globalContext().userEnabledCuDNNSDP()) {
    if (cudnn_) at::globalContext().setSDPUseCuDNN(false);
  }
  ~NoLateKernels() {
    if (cudnn_) at::globalContext().setSDPUseCuDNN(true);
  }
  NoLateKernels(const NoLateKernels&) = delete;
  NoLateKernels& operator=(const NoLateKernels&) = delete;

 private:
  const bool cudnn_;
};

// Which of its host's ranks it is.
int place_on_host(const World& world, int rank) {
  int place = 0;
  for (int other = 0; other < rank; ++other)
    place += world.place(other).host == world.place(rank).host;
  return place;
}

void fail_as(World& world, int rank, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    world.fail(rank, e.kind(), e.what());
  } catch (const std::exception& e) {
    world.fail(rank, Kind::Internal, text_of(e));
  } catch (...) {
    world.fail(rank, Kind::Internal, "an exception that is no std::exception");
  }
}

// The first failure as the caller of run_ranks hears of it.
Error report(const World& world, const World::Failure& failure) {
  std::string text =
      failure.rank < 0 ? failure.what : cat(world.name_of(failure.rank), " failed: ", failure.what);
  if (!failure.others.empty()) {
    const size_t listed = std::min(kMaxListed, failure.others.size());
    text += "\n  meanwhile " +
            join({failure.others.begin(), failure.others.begin() + long(listed)}, "\n            ");
    if (listed < failure.others.size())
      text += cat("\n            and ", failure.others.size() - listed, " more");
  }
  return Error(failure.kind, text);
}

}  // namespace

void detail::run_here(const std::shared_ptr<World>& world,
                      const std::function<void(Communicator&)>& run, const RunOptions& options) {
  const int first = world->first_here(), num_ranks = world->num_here();
  if (!options.devices.empty() && int(options.devices.size()) != num_ranks)
    fail(Kind::Usage, num_ranks, " ranks need ", num_ranks, " devices, got ",
         options.devices.size());
  const int on_host = world->ranks_on_host(first);
  const int cores = std::max(1, int(std::thread::hardware_concurrency()));
  const int threads =
      options.threads_per_rank > 0 ? options.threads_per_rank : std::max(1, cores / on_host);

  const NoLateKernels no_late_kernels(
      std::ranges::count(options.devices, topo::DeviceKind::Cuda, &topo::Device::kind) > 1);
  if (options.on_world) options.on_world(world);
  const BackendFactory backend = options.backend ? options.backend : local_backend();
  std::vector<Communicator> ends;
  try {
    ends = backend.connect(world, options.devices);
  } catch (const Error& error) {
    if (error.kind() == Kind::Comm && !world->one_process() && world->failed_soon())
      throw report(*world, *world->failure());
    world->fail(first, error.kind(), error.what());
    throw;
  }
  std::vector<std::exception_ptr> errors(static_cast<size_t>(num_ranks));
  std::atomic<bool> heard{false};  // that the world has failed, while a rank was still in it
  auto rank_main = [&](int place) {
    const auto me = size_t(place);
    const int rank = first + place;
    try {
      if (options.pin) pin_to_cores(place_on_host(*world, rank), on_host);
      // Without the first call, a thread takes the last number that any thread has set.
      at::get_num_threads();
      at::set_num_threads(threads);
      if (!options.devices.empty() && options.devices[me].kind == topo::DeviceKind::Cuda)
        cuda_enter(options.devices[me].index);
      const Communicator end = ends[me];  // the caller may have moved its own away
      run(ends[me]);
      end.leave();
    } catch (...) {
      errors[me] = std::current_exception();
      fail_as(*world, rank, errors[me]);
    }
    ends[me] = {};
    if (world->failed()) heard = true;
    world->leave(rank);
  };
  {
    std::vector<std::jthread> threads_of_ranks;
    for (int place = 0; place < num_ranks; ++place) threads_of_ranks.emplace_back(rank_main, place);
  }

  const auto failure = world->failure();
  // A process whose ranks have all returned hears no more of its world.
  if (!failure || (!heard && !world->one_process())) return;
  const bool mine = failure->rank >= 0 && world->here(failure->rank);
  if (!mine || !errors[size_t(failure->rank - first)]) throw report(*world, *failure);
  try {
    std::rethrow_exception(errors[size_t(failure->rank - first)]);
  } catch (...) {
    std::throw_with_nested(report(*world, *failure));  // the rank's own exception goes along
  }
}

void run_ranks(int num_ranks, const std::function<void(Communicator&)>& run,
               const RunOptions& options) {
  if (num_ranks < 1) fail(Kind::Usage, "a run needs at least 1 rank, got ", num_ranks);
  detail::run_here(std::make_shared<World>(num_ranks, options.world), run, options);
}

}  // namespace yoke::comm
