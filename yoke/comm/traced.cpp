// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/traced.h"

namespace yoke::comm {
namespace {

using observe::Category;
using observe::Span;
using observe::Tracer;

Category category_of(OpKind kind) { return kind == OpKind::Recv ? Category::Wait : Category::Comm; }

class TracedWork final : public Work::Impl {
 public:
  TracedWork(Work work, OpKind kind, Tracer& tracer)
      : work_(std::move(work)), kind_(kind), tracer_(tracer) {}
  void wait() override {
    const Span span(&tracer_, to_string(kind_), category_of(kind_));
    work_.wait();
  }
  void synchronize() override {
    const Span span(&tracer_, to_string(kind_), category_of(kind_));
    work_.synchronize();
  }
  bool done() const override { return work_.done(); }

 private:
  const Work work_;
  const OpKind kind_;
  Tracer& tracer_;
};

class TracedBackend final : public Backend {
 public:
  TracedBackend(Communicator whole, Tracer& tracer) : whole_(std::move(whole)), tracer_(tracer) {}
  int rank() const override { return whole_.rank(); }
  int size() const override { return whole_.size(); }
  const std::string& name() const override { return whole_.name(); }
  Work issue(Operation operation) override {
    const OpKind kind = operation.kind;
    const Span span(&tracer_, to_string(kind), Category::Comm);
    return wrapped(whole_.backend().issue(std::move(operation)), kind);
  }
  Work issue_group(std::vector<Operation> messages) override {
    const Span span(&tracer_, "messages", Category::Comm);
    return wrapped(whole_.backend().issue_group(std::move(messages)), OpKind::Recv);
  }
  std::shared_ptr<Backend> split(int color, int key) override {
    const auto part = whole_.split(color, key);
    return part ? std::make_shared<TracedBackend>(part, tracer_) : nullptr;
  }
  void abort(const std::string& reason) override { whole_.abort(reason); }
  void leave() override { whole_.leave(); }
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return whole_.allocate(sizes, options);
  }
  Capabilities capabilities() const override { return whole_.capabilities(); }

 private:
  Work wrapped(Work work, OpKind kind) {
    return Work(std::make_shared<TracedWork>(std::move(work), kind, tracer_));
  }

  const Communicator whole_;
  Tracer& tracer_;
};

}  // namespace

Communicator traced(const Communicator& comm, Tracer& tracer) {
  return Communicator(std::make_shared<TracedBackend>(comm, tracer));
}

}  // namespace yoke::comm
