// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/stop_signal.h"

#include <ATen/ops/full.h>

#include <atomic>
#include <ctime>

namespace yoke::comm {
namespace {

std::atomic<int> pending_signal{0};  // a handler has nothing else to write to
static_assert(std::atomic<int>::is_always_lock_free);

std::atomic<int64_t> first_ms{0};  // when it came
// Launchers send a signal twice: to the group and to each. Nobody types as fast.
constexpr int64_t kSameMs = 1000, kSameTypedMs = 100;

void note_signal(int signal) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t ms = now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
  const int before = pending_signal.exchange(signal);
  if (before != signal) first_ms.store(ms);
  if (before != signal || signal == SIGUSR1) return;
  if (ms - first_ms.load() <= (signal == SIGINT ? kSameTypedMs : kSameMs)) return;
  std::signal(signal, SIG_DFL);
  ::raise(signal);
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
