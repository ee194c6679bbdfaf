// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/local/cuda_lane.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <optional>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/base/mutex.h"

namespace yoke::comm {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(Kind::Device, what, ": ", cudaGetErrorString(status));
}

// Not an error; but LibTorch would take it for one of the next launch's.
bool not_ready(cudaError_t status) {
  if (status != cudaErrorNotReady) return false;
  cudaGetLastError();
  return true;
}

// The stream memory operations live in the driver; asking the runtime for them needs no link to it.
template <typename Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess)
    fail(Kind::Device, "the CUDA driver has no ", name, "; it must be 12.0 or newer");
  return reinterpret_cast<Function>(entry);
}

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

void stream_value(StreamValue function, cudaStream_t stream, void* address, uint32_t value,
                  unsigned int flags) {
  const CUresult status = function(stream, reinterpret_cast<CUdeviceptr>(address), value, flags);
  if (status != CUDA_SUCCESS)
    fail(Kind::Device, "a CUDA stream memory operation failed with code ", int(status));
}

// Making and freeing an event takes a lock that launches want as well: so they are kept.
class SpareEvents {
 public:
  cudaEvent_t take(int device) {
    {
      MutexLock lock(mutex_);
      if (auto& spare = spare_[device]; !spare.empty()) {
        const cudaEvent_t event = spare.back();
        spare.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  void give(int device, cudaEvent_t event) {
    MutexLock lock(mutex_);
    spare_[device].push_back(event);
  }

 private:
  Mutex mutex_;
  std::map<int, std::vector<cudaEvent_t>> spare_ YOKE_GUARDED_BY(mutex_);
};

SpareEvents& spare_events() {
  static auto* const events = new SpareEvents;  // outlives every thread
  return *events;
}

}  // namespace

// Of the device that is current when it is made.
class CudaEvent {
 public:
  CudaEvent() : device_(c10::cuda::current_device()), event_(spare_events().take(device_)) {}
  ~CudaEvent() { spare_events().give(device_, event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void hold_up(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  // An error of the device counts as passed: the wait after it will report it.
  bool passed() const { return !not_ready(cudaEventQuery(event_)); }
  void synchronize() const { cudaEventSynchronize(event_); }

 private:
  const int device_;
  const cudaEvent_t event_;
};

bool cuda_available() { return c10::cuda::device_count() > 0; }

namespace {

// A thread's stream, kept for the next one when the thread ends. Not of LibTorch's pool: that makes
// 128 of them, and a GPU has 32 queues. Streams that share one wait for each other, and ranks on
// one GPU then for ever.
class OwnStream {
 public:
  explicit OwnStream(int device) : device_(device) {
    MutexLock lock(kept().mutex);
    auto& free = kept().streams[device];
    if (free.empty()) {
      cudaStream_t made = nullptr;
      check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
      free.push_back(made);
    }
    stream_ = free.back();
    free.pop_back();
    c10::cuda::setCurrentCUDAStream(
        c10::cuda::getStreamFromExternal(stream_, c10::DeviceIndex(device)));
  }
  ~OwnStream() {
    MutexLock lock(kept().mutex);
    kept().streams[device_].push_back(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  struct Kept {
    Mutex mutex;
    std::map<int, std::vector<cudaStream_t>> streams YOKE_GUARDED_BY(mutex);  // by device
  };
  static Kept& kept() {
    static Kept* streams = new Kept;  // threads may outlive the statics
    return *streams;
  }
  const int device_;
  cudaStream_t stream_;
};

}  // namespace

void cuda_use(int device) {
  if (device >= c10::cuda::device_count())
    fail(Kind::Device, "there is no cuda:", device, "; this host has ",
         int(c10::cuda::device_count()), " CUDA devices");
  c10::cuda::set_device(c10::DeviceIndex(device));
}

void cuda_enter(int device) {
  cuda_use(device);
  thread_local std::optional<OwnStream> stream;
  stream.emplace(device);
}

std::shared_ptr<CudaEvent> cuda_mark(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  auto event = std::make_shared<CudaEvent>();
  event->record(c10::cuda::getCurrentCUDAStream(device.index()));
  return event;
}

std::shared_ptr<CudaEvent> cuda_mark_busy(at::Device device) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  return not_ready(cudaStreamQuery(stream)) ? cuda_mark(device) : nullptr;
}

void cuda_wait(const CudaEvent& event, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  event.hold_up(c10::cuda::getCurrentCUDAStream(device.index()));
}

bool cuda_passed(const CudaEvent& event) { return event.passed(); }

// As local/reduce.h does it.
at::Tensor cuda_fold(const std::vector<at::Tensor>& sources, ReduceOp op) {
  const at::ScalarType type = sources[0].scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  auto widened = [&](const at::Tensor& t) { return half ? t.to(at::kFloat) : t; };
  auto both = [&](const at::Tensor& a, const at::Tensor& b) {
    switch (op) {
      case ReduceOp::Min:
        return at::minimum(a, b);
      case ReduceOp::Max:
        return at::maximum(a, b);
      case ReduceOp::Product:
        return type == at::kBool ? at::logical_and(a, b) : a * b;
      default:
        return type == at::kBool ? at::logical_or(a, b) : a + b;
    }
  };
  at::Tensor folded = widened(sources[0]);
  for (size_t i = 1; i < sources.size(); ++i) folded = both(folded, widened(sources[i]));
  if (op == ReduceOp::Mean) folded = folded / double(sources.size());
  return folded.to(type);
}

// One stream for each device that takes part. They are the lane's alone: in a stream of LibTorch's
// pool an operation could come to stand behind another lane's, which may be waiting for this very
// one.
struct CudaLane::Impl {
  StreamValue wait_value = driver_function<StreamValue>("cuStreamWaitValue32");
  StreamValue write_value = driver_function<StreamValue>("cuStreamWriteValue32");
  uint32_t* counter = nullptr;  // pinned, seen by every device
  std::map<c10::DeviceIndex, c10::cuda::CUDAStream> streams;
  std::shared_ptr<CudaEvent> last;

  Impl() {
    check(cudaHostAlloc(reinterpret_cast<void**>(&counter), sizeof *counter,
                        cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc");
    std::atomic_ref(*counter).store(0);
  }
  ~Impl() {
    if (last) last->synchronize();
    for (auto& [device, stream] : streams) cudaStreamDestroy(stream.stream());
    cudaFreeHost(counter);
  }

  const c10::cuda::CUDAStream& stream(at::Device device) {
    const auto known = streams.find(device.index());
    if (known != streams.end()) return known->second;
    const c10::cuda::CUDAGuard guard(device);
    int lowest = 0, highest = 0;
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest), "cudaStreamCreate");
    return streams.emplace(device.index(), c10::cuda::getStreamFromExternal(made, device.index()))
        .first->second;
  }

  // Every stream goes on only when all have done what they were given so far.
  void rendezvous() {
    if (streams.size() == 1) return;
    for (const auto& [device, stream] : streams) {
      const c10::cuda::CUDAGuard guard(stream.device());
      CudaEvent here;
      here.record(stream);
      for (const auto& [other, waiting] : streams)
        if (other != device) here.hold_up(waiting);
    }
  }

  static void copy(const at::Tensor& to, const at::Tensor& from, cudaStream_t stream) {
    check(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(),
                          cudaMemcpyDefault, stream),
          "cudaMemcpyAsync");
  }

  void run(const Job& job, int64_t begin, int64_t end, std::optional<ReduceOp> reduce,
           const c10::cuda::CUDAStream& stream) {
    if (begin == end) return;
    const c10::cuda::CUDAStreamGuard guard(stream);
    auto cut = [&](const at::Tensor& t) { return t.view({-1}).narrow(0, begin, end - begin); };
    at::Tensor result = cut(job.sources[0]);
    if (job.sources.size() > 1) {
      std::vector<at::Tensor> near;  // the sources, on this device
      for (const auto& source : job.sources) {
        near.push_back(cut(source));
        if (source.device() == stream.device()) continue;
        near.back() = at::empty({end - begin}, source.options().device(stream.device()));
        copy(near.back(), cut(source), stream);
      }
      result = cuda_fold(near, *reduce);
    }
    for (const auto& target : job.targets) copy(cut(target), result, stream);
  }
};

CudaLane::CudaLane() : impl_(std::make_unique<Impl>()) {}
CudaLane::~CudaLane() { release(); }

std::shared_ptr<CudaEvent> CudaLane::launch(uint32_t number, const std::vector<Operation>& parts,
                                            const std::vector<std::shared_ptr<CudaEvent>>& marks,
                                            const std::vector<Job>& jobs) {
  const at::NoGradGuard no_grad;
  auto run_copies = [&](const Operation& part, const std::vector<Operation::Copy>& copies) {
    const c10::cuda::CUDAStreamGuard guard(impl_->stream(part.subject().device()));
    for (const auto& [from, to] : copies) to.copy_(from, /*non_blocking=*/true);
  };
  for (size_t i = 0; i < parts.size(); ++i) {
    marks[i]->hold_up(impl_->stream(parts[i].subject().device()));
    run_copies(parts[i], parts[i].before);
  }
  impl_->rendezvous();
  for (const auto& job : jobs) {
    const int64_t count = job.sources[0].numel();
    if (jobs.size() == 1 && job.sources.size() > 1) {  // each device folds its share
      int64_t share = 0;
      const int64_t shares = int64_t(impl_->streams.size());
      for (const auto& [device, stream] : impl_->streams) {
        impl_->run(job, count * share / shares, count * (share + 1) / shares, parts[0].reduce,
                   stream);
        ++share;
      }
    } else {
      impl_->run(job, 0, count, parts[0].reduce, impl_->stream(job.targets[0].device()));
    }
  }
  impl_->rendezvous();
  for (const auto& part : parts) run_copies(part, part.after);
  impl_->rendezvous();
  const auto& stream = impl_->stream(parts[0].subject().device());
  const c10::cuda::CUDAStreamGuard guard(stream);
  impl_->last = std::make_shared<CudaEvent>();
  impl_->last->record(stream);
  stream_value(impl_->write_value, stream, impl_->counter, number, 0);
  return impl_->last;
}

void CudaLane::wait_for(uint32_t number, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  stream_value(impl_->wait_value, c10::cuda::getCurrentCUDAStream(device.index()), impl_->counter,
               number, CU_STREAM_WAIT_VALUE_GEQ);
}

// The comparison is cyclic: half the number range ahead of whatever anybody can be waiting for.
void CudaLane::release() {
  std::atomic_ref counter(*impl_->counter);
  if (counter.load() < 0x40000000u) counter.store(0x60000000u);
}

}  // namespace yoke::comm
