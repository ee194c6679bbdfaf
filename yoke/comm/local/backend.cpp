// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/local/backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <sys/mman.h>

#include <cstdlib>
#include <numeric>

#include "yoke/base/text.h"
#include "yoke/comm/local/group.h"

namespace yoke::comm {
namespace {

// A collective walks through the whole of a buffer: on huge pages it looks up far fewer addresses.
at::Tensor on_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (bytes < 2 * kHugePage) return at::empty(sizes, options);
  const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, rounded);
  if (memory == nullptr) fail(Kind::Device, "out of memory: cannot allocate ", bytes_text(bytes));
  ::madvise(memory, rounded, MADV_HUGEPAGE);  // a wish, which the system may refuse
  return at::from_blob(memory, sizes, &std::free, options);
}

class LocalWork final : public Work::Impl {
 public:
  LocalWork(std::shared_ptr<LocalGroup> group, int rank, std::shared_ptr<Pending> pending,
            at::Device device)
      : group_(std::move(group)), rank_(rank), pending_(std::move(pending)), device_(device) {}

  void wait() override {
    if (pending_->on_cuda)
      group_->stream_wait(rank_, *pending_, device_);
    else
      group_->wait(rank_, *pending_);
  }
  void synchronize() override { group_->wait(rank_, *pending_); }
  bool done() const override { return pending_->over(); }

 private:
  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
  const std::shared_ptr<Pending> pending_;
  const at::Device device_;
};

class LocalBackend final : public Backend {
 public:
  LocalBackend(std::shared_ptr<LocalGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }

  Work issue(Operation operation) override {
    const at::Tensor& subject = operation.subject();
    const at::Device device = subject.defined() ? subject.device() : at::Device(at::kCPU);
    return Work(std::make_shared<LocalWork>(group_, rank_,
                                            group_->post(rank_, std::move(operation)), device));
  }

  // Posting never blocks, so messages posted one after the other cannot hold each other up.
  Work issue_group(std::vector<Operation> messages) override {
    std::vector<Work> parts;
    for (auto& message : messages) parts.push_back(issue(std::move(message)));
    return Work::all(std::move(parts));
  }

  std::shared_ptr<Backend> split(int color, int key) override {
    const auto [group, rank] = group_->split(rank_, color, key);
    return group ? std::make_shared<LocalBackend>(group, rank) : nullptr;
  }

  void abort(const std::string& reason) override {
    group_->world().fail(-1, Kind::Comm,
                         cat("aborted by rank ", group_->world_rank(rank_), ": ", reason));
  }

  void leave() override {}  // any rank can end any operation

  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return options.device().is_cpu() ? on_huge_pages(sizes, options) : at::empty(sizes, options);
  }

  Capabilities capabilities() const override {
    return {.backend = "local",
            .cpu = true,
            .cuda = cuda_available(),
            .checks_before_data_moves = true,
            .sums_in_rank_order = true,
            .abort_wakes_peers = true,
            .messages_overtake = true};
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
};

std::vector<Communicator> connect(const std::shared_ptr<World>& world) {
  if (!world->one_process())
    fail(Kind::Usage, "the local backend joins the threads of one process, and this world has ",
         world->size() - world->num_here(),
         " ranks in others; choose shm (one host), nccl (GPUs) or mpi");
  std::vector<int> members(size_t(world->size()));
  std::iota(members.begin(), members.end(), 0);
  const auto group = LocalGroup::make(world, "world", members);
  std::vector<Communicator> ends;
  for (const int rank : members) ends.emplace_back(std::make_shared<LocalBackend>(group, rank));
  return ends;
}

}  // namespace

BackendFactory local_backend() {
  return {.name = "local",
          .connect = [](const auto& world, const auto&) { return connect(world); }};
}

}  // namespace yoke::comm
