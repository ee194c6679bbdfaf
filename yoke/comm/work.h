// SPDX-License-Identifier: Apache-2.0
// What an operation of a Communicator returns: a copyable handle on something in flight. Dropping
// it does not cancel the operation; the tensors stay alive until the operation is over.
#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace yoke::comm {

class Work {
 public:
  // The backend's side. Every wait has the deadline of its world and throws the first cause.
  class Impl {
   public:
    virtual ~Impl() = default;
    virtual void wait() = 0;
    virtual void synchronize() = 0;
    virtual bool done() const = 0;
  };

  Work() = default;  // already done
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  // Done when all of the parts are; waits for them in order.
  static Work all(std::vector<Work> parts);

  // CPU tensors: blocks until the result is there. CUDA tensors: makes the current stream wait for
  // the result and returns; outside backward, when every rank has issued the operation. Rethrows
  // what went wrong.
  void wait() const {
    if (impl_) impl_->wait();
  }
  // Blocks the host until the result is in memory, on every device.
  void synchronize() const {
    if (impl_) impl_->synchronize();
  }
  // True when the result is in memory. Never blocks, never throws.
  bool done() const { return !impl_ || impl_->done(); }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace yoke::comm
