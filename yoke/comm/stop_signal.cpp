// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/stop_signal.h"

#include <ATen/ops/full.h>

#include <atomic>

namespace yoke::comm {
namespace {

std::atomic<int> pending_signal{0};  // a handler has nothing else to write to
static_assert(std::atomic<int>::is_always_lock_free);

void note_signal(int signal) {
  pending_signal.store(signal);
  if (signal == SIGINT) std::signal(SIGINT, SIG_DFL);
}

}  // namespace

StopSignal::StopSignal() {
  pending_signal.store(0);
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before_[i]);
}

StopSignal::~StopSignal() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int StopSignal::pending() const { return pending_signal.load(); }

int StopSignal::agreed(const Communicator& comm) const {
  const bool on_cpu = comm.capabilities().cpu;
  const at::Tensor highest =
      at::full({1}, pending(), at::device(on_cpu ? at::kCPU : at::kCUDA).dtype(at::kInt));
  comm.all_reduce(highest, ReduceOp::Max).wait();
  return highest.item<int>();
}

}  // namespace yoke::comm
