// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/replicas.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/parallel/shares.h"
#include "yoke/parallel/workers.h"

namespace yoke::parallel {

struct Replicas::Impl {
  std::vector<Replica> replicas;
  std::vector<double> shares = {};
  Workers workers;
};

Replicas::Replicas(std::vector<Replica> replicas) {
  if (replicas.empty()) fail(Kind::Usage, "Replicas wants at least one replica");
  std::vector<double> shares;
  for (const auto& replica : replicas) {
    if (!(replica.share > 0)) fail(Kind::Usage, "a share is a number above 0, got ", replica.share);
    shares.push_back(replica.share);
  }
  const int on_cpu =
      int(std::ranges::count_if(replicas, [](const auto& r) { return r.device.is_cpu(); }));
  const int threads = std::max(1, at::get_num_threads() / std::max(1, on_cpu));
  const int count = int(replicas.size());
  impl_.reset(new Impl{std::move(replicas), std::move(shares), {count, threads}});
}

Replicas::~Replicas() = default;

at::Tensor Replicas::forward(const at::Tensor& batch) {
  if (batch.dim() == 0 || batch.size(0) == 0)
    fail(Kind::Usage, "Replicas::forward wants a batch of one sample or more");
  const auto counts = divide(batch.size(0), impl_->shares);
  const c10::impl::VirtualGuardImpl device(batch.device().type());
  const c10::Stream stream = device.getStream(batch.device());  // on which the batch is made
  std::vector<at::Tensor> results(counts.size());               // in order
  std::vector<Workers::Task> tasks(counts.size());
  for (int64_t i = 0, begin = 0; i < int64_t(counts.size()); begin += counts[size_t(i++)]) {
    if (counts[size_t(i)] == 0) continue;
    const at::Tensor piece = batch.narrow(0, begin, counts[size_t(i)]);
    tasks[size_t(i)] = [&, stream, piece, &replica = impl_->replicas[size_t(i)],
                        &result = results[size_t(i)]] {
      const at::NoGradGuard no_grad;
      const c10::StreamGuard on(stream);  // here it is this thread's too
      const c10::OptionalDeviceGuard guard(replica.device);
      result = replica.forward(piece.to(replica.device)).to(batch.device());
    };
  }
  impl_->workers.run(std::move(tasks));
  std::erase_if(results, [](const auto& result) { return !result.defined(); });
  return at::cat(results);
}

}  // namespace yoke::parallel
