// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/mpi/backend.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "yoke/comm/mpi/engine.h"

namespace yoke::comm {
namespace {

class MpiWork final : public Work::Impl {
 public:
  MpiWork(std::shared_ptr<MpiRank> rank, std::shared_ptr<MpiTask> task)
      : rank_(std::move(rank)), task_(std::move(task)) {}

  void wait() override { rank_->wait(*task_); }
  void synchronize() override { rank_->wait(*task_); }
  bool done() const override { return rank_->poll(*task_); }

 private:
  const std::shared_ptr<MpiRank> rank_;
  const std::shared_ptr<MpiTask> task_;
};

class MpiBackend final : public Backend {
 public:
  MpiBackend(std::shared_ptr<MpiRank> rank, std::shared_ptr<MpiGroup> group)
      : rank_(std::move(rank)), group_(std::move(group)) {}

  int rank() const override { return group_->rank; }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name; }

  Work issue(Operation operation) override {
    return Work(std::make_shared<MpiWork>(rank_, rank_->post(group_, std::move(operation))));
  }

  // Posting never blocks, so messages posted one after the other cannot hold each other up.
  Work issue_group(std::vector<Operation> messages) override {
    std::vector<Work> parts;
    for (auto& message : messages) parts.push_back(issue(std::move(message)));
    return Work::all(std::move(parts));
  }

  std::shared_ptr<Backend> split(int color, int key) override {
    const auto task = rank_->post(group_, {.kind = OpKind::Split, .color = color, .key = key});
    rank_->wait(*task);
    return task->formed ? std::make_shared<MpiBackend>(rank_, task->formed) : nullptr;
  }

  void abort(const std::string& reason) override {
    rank_->world().fail(-1, Kind::Comm, cat("aborted by rank ", rank_->rank(), ": ", reason));
  }

  void leave() override { rank_->leave(); }

  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return at::empty(sizes, options);
  }

  Capabilities capabilities() const override {
    return {.backend = "mpi",
            .cpu = true,
            .cuda = false,
            .checks_before_data_moves = rank_->world().options().check,
            .sums_in_rank_order = true,
            .abort_wakes_peers = true,
            .messages_overtake = true};
  }

 private:
  const std::shared_ptr<MpiRank> rank_;
  const std::shared_ptr<MpiGroup> group_;
};

std::vector<Communicator> connect(const std::shared_ptr<World>& world,
                                  const std::vector<topo::Device>& devices) {
  if (world->num_here() != 1)
    fail(Kind::Usage, "the mpi backend has one rank in each process, and this one has ",
         world->num_here(), "; start as many processes as ranks, or choose another backend");
  if (std::ranges::any_of(devices, [](auto& d) { return d.kind == topo::DeviceKind::Cuda; }))
    fail(Kind::Usage, "the mpi backend moves tensors of the CPU only; choose nccl for GPUs");
  const auto rank = std::make_shared<MpiRank>(world, MpiChannel::open(world));
  std::vector<int> members(size_t(world->size()));
  std::iota(members.begin(), members.end(), 0);
  const auto group = rank->form_group("world", std::move(members), rank->next_context());
  return {Communicator(std::make_shared<MpiBackend>(rank, group))};
}

}  // namespace

BackendFactory mpi_backend() {
  return {.name = "mpi", .connect = connect, .share = share_over_mpi};
}

}  // namespace yoke::comm
