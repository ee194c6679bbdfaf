// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/replicas.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <latch>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/queue.h"
#include "yoke/parallel/shares.h"

namespace yoke::parallel {
namespace {

using Task = std::function<void()>;
constexpr size_t kQueued = 64;
constexpr Duration kForever = std::chrono::hours(1000);  // until it is closed

}  // namespace

struct Replicas::Impl {
  struct Worker {
    Replica replica;
    BoundedQueue<Task> tasks{kQueued};
    std::jthread thread = {};
  };
  std::deque<Worker> workers;
  std::vector<double> shares;

  ~Impl() {
    for (auto& worker : workers) worker.tasks.close();
  }
};

Replicas::Replicas(std::vector<Replica> replicas) : impl_(std::make_unique<Impl>()) {
  if (replicas.empty()) fail(Kind::Usage, "Replicas wants at least one replica");
  const int on_cpu =
      int(std::ranges::count_if(replicas, [](const auto& r) { return r.device.is_cpu(); }));
  const int threads = std::max(1, at::get_num_threads() / std::max(1, on_cpu));
  for (auto& replica : replicas) {
    if (!(replica.share > 0)) fail(Kind::Usage, "a share is a number above 0, got ", replica.share);
    impl_->shares.push_back(replica.share);
    auto& worker = impl_->workers.emplace_back();
    worker.replica = std::move(replica);
    worker.thread = std::jthread([&worker, threads] {
      at::get_num_threads();  // else a thread takes what any other set last
      at::set_num_threads(threads);
      while (auto task = worker.tasks.pop(kForever)) (*task)();
    });
  }
}

Replicas::~Replicas() = default;

at::Tensor Replicas::forward(const at::Tensor& batch) {
  if (batch.dim() == 0 || batch.size(0) == 0)
    fail(Kind::Usage, "Replicas::forward wants a batch of one sample or more");
  const auto counts = divide(batch.size(0), impl_->shares);
  const c10::impl::VirtualGuardImpl device(batch.device().type());
  const c10::Stream stream = device.getStream(batch.device());  // on which the batch is made
  const auto num_pieces = std::ranges::count_if(counts, [](int64_t n) { return n > 0; });
  std::vector<at::Tensor> results;  // in order
  std::vector<std::exception_ptr> errors;
  results.resize(size_t(num_pieces));
  errors.resize(size_t(num_pieces));
  std::latch left(num_pieces);
  int64_t begin = 0;
  size_t next = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    auto& worker = impl_->workers[i];
    const at::Tensor piece = batch.narrow(0, begin, counts[i]);
    begin += counts[i];
    Task task([&, stream, piece, mine = next++] {
      try {
        const at::NoGradGuard no_grad;
        const c10::StreamGuard on(stream);  // here it is this thread's too
        const c10::OptionalDeviceGuard guard(worker.replica.device);
        results[mine] = worker.replica.forward(piece.to(worker.replica.device)).to(batch.device());
      } catch (...) {
        errors[mine] = std::current_exception();
      }
      left.count_down();
    });
    YOKE_CHECK(worker.tasks.push(std::move(task), kForever));
  }
  left.wait();  // for all of them: they use the caller's batch
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
  return at::cat(results);
}

}  // namespace yoke::parallel
