// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/wire.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

namespace yoke::parallel {
namespace {

class PlainWire final : public Wire {
 public:
  comm::Work all_reduce(const comm::Communicator& comm, const at::Tensor& full) const override {
    return comm.all_reduce(full);
  }
  comm::Work reduce_scatter(const comm::Communicator& comm, const at::Tensor& shard,
                            const at::Tensor& full) const override {
    return comm.reduce_scatter(shard, full);
  }
};

// What has travelled in another type is turned back when it is awaited.
class Unpack final : public comm::Work::Impl {
 public:
  Unpack(comm::Work work, at::Tensor packed, at::Tensor into, at::Tensor scale)
      : work_(std::move(work)), packed_(std::move(packed)), into_(std::move(into)), scale_(scale) {}
  void wait() override {
    work_.wait();
    unpack();
  }
  void synchronize() override {
    work_.synchronize();
    unpack();
  }
  bool done() const override { return !packed_.defined(); }

 private:
  void unpack() {
    if (!packed_.defined()) return;
    const at::NoGradGuard no_grad;
    into_.copy_(packed_);
    if (scale_.defined()) into_.mul_(scale_);
    packed_.reset();
  }
  comm::Work work_;
  at::Tensor packed_, into_, scale_;
};

class NarrowWire final : public Wire {
 public:
  explicit NarrowWire(at::ScalarType type) : type_(type) {}

  comm::Work all_reduce(const comm::Communicator& comm, const at::Tensor& full) const override {
    const at::Tensor scale = scale_for(comm, full), packed = pack(full, scale);
    return unpacked(comm.all_reduce(packed), packed, full, scale);
  }
  comm::Work reduce_scatter(const comm::Communicator& comm, const at::Tensor& shard,
                            const at::Tensor& full) const override {
    const at::Tensor scale = scale_for(comm, full), packed = pack(full, scale);
    const at::Tensor part = at::empty_like(shard, packed.options());
    return unpacked(comm.reduce_scatter(part, packed), part, shard, scale);
  }

 private:
  at::Tensor scale_for(const comm::Communicator& comm, const at::Tensor& full) const {
    if (type_ != at::kHalf) return {};
    const at::Tensor largest = full.abs().max();
    comm.all_reduce(largest, comm::ReduceOp::Max).wait();
    constexpr double kLargest = 60000;  // float16 ends at 65504, and every part is rounded
    return largest.clamp_min(1e-30).mul(comm.size() / kLargest);
  }
  at::Tensor pack(const at::Tensor& full, const at::Tensor& scale) const {
    return (scale.defined() ? full / scale : full).to(type_);
  }
  static comm::Work unpacked(comm::Work work, const at::Tensor& packed, const at::Tensor& into,
                             const at::Tensor& scale) {
    return comm::Work(std::make_shared<Unpack>(std::move(work), packed, into, scale));
  }
  const at::ScalarType type_;
};

}  // namespace

std::shared_ptr<const Wire> plain_wire() { return std::make_shared<PlainWire>(); }
std::shared_ptr<const Wire> bf16_wire() { return std::make_shared<NarrowWire>(at::kBFloat16); }
std::shared_ptr<const Wire> fp16_wire() { return std::make_shared<NarrowWire>(at::kHalf); }

}  // namespace yoke::parallel
