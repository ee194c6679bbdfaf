// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/shm/backend.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <numeric>

#include "yoke/comm/shm/rank.h"

namespace yoke::comm {
namespace {

class ShmWork final : public Work::Impl {
 public:
  ShmWork(std::shared_ptr<ShmRank> rank, std::shared_ptr<ShmGroup> group,
          std::shared_ptr<ShmPending> pending)
      : rank_(std::move(rank)), group_(std::move(group)), pending_(std::move(pending)) {}

  void wait() override { rank_->wait(*group_, *pending_); }
  void synchronize() override { wait(); }
  bool done() const override {
    try {
      rank_->progress(/*steal=*/false);
    } catch (const std::exception&) {  // wait() will say it
    }
    return pending_->done;
  }

 private:
  const std::shared_ptr<ShmRank> rank_;
  const std::shared_ptr<ShmGroup> group_;
  const std::shared_ptr<ShmPending> pending_;
};

class ShmBackend final : public Backend {
 public:
  ShmBackend(std::shared_ptr<ShmRank> rank, std::shared_ptr<ShmGroup> group)
      : rank_(std::move(rank)), group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }

  Work issue(Operation operation) override {
    const at::Tensor& subject = operation.subject();
    if (subject.defined() && !subject.is_cpu())
      fail(Kind::Usage, "the shm backend moves CPU tensors, got ", operation.text(),
           "; GPUs need nccl, or local for the threads of one process");
    return Work(std::make_shared<ShmWork>(rank_, group_, group_->post(std::move(operation))));
  }

  // Posting never blocks, so messages posted one after the other cannot hold each other up.
  Work issue_group(std::vector<Operation> messages) override {
    std::vector<Work> parts;
    for (auto& message : messages) parts.push_back(issue(std::move(message)));
    return Work::all(std::move(parts));
  }

  std::shared_ptr<Backend> split(int color, int key) override {
    const auto pending = group_->post({.kind = OpKind::Split, .color = color, .key = key});
    rank_->wait(*group_, *pending);
    if (color < 0) return nullptr;
    std::vector<int> members;
    int mine = 0;
    for (const int r : pending->members) {
      if (r == rank()) mine = int(members.size());
      members.push_back(group_->world_rank(r));
    }
    const Board board(rank_->memory().address(pending->formed), int(members.size()));
    const std::string name = cat(group_->name(), "/", pending->sequence, ".", color);
    return std::make_shared<ShmBackend>(rank_, rank_->add_group(name, members, mine, board));
  }

  void abort(const std::string& reason) override {
    rank_->world().fail(-1, Kind::Comm, cat("aborted by rank ", rank_->rank(), ": ", reason));
  }

  void leave() override { rank_->leave(); }

  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    const auto memory = rank_->shared_memory();
    const size_t bytes = size_t(c10::multiply_integers(sizes)) * options.dtype().itemsize();
    void* place = memory->allocate(bytes);
    return at::from_blob(
        place, sizes, [memory](void* p) { memory->free(p); }, options);
  }

  Capabilities capabilities() const override {
    return {.backend = "shm",
            .cpu = true,
            .checks_before_data_moves = true,
            .sums_in_rank_order = true,
            .abort_wakes_peers = true,
            .messages_overtake = true};
  }

 private:
  const std::shared_ptr<ShmRank> rank_;
  const std::shared_ptr<ShmGroup> group_;
};

std::vector<Communicator> connect(const std::shared_ptr<World>& world,
                                  const std::vector<topo::Device>& devices) {
  for (const auto& device : devices)
    if (device.kind != topo::DeviceKind::Cpu)
      fail(Kind::Usage, "the shm backend is for CPU ranks; choose nccl for GPUs");
  for (int rank = 0; rank < world->size(); ++rank)
    if (world->place(rank).machine != world->place(0).machine)
      fail(Kind::Usage, "the shm backend is for one host, and this world has ranks on ",
           world->place(0).host, " and ", world->place(rank).host,
           "; choose mpi, or nccl for GPUs");
  const int n = world->size();
  const auto memory = SharedMemory::open(world, ShmRank::bells_bytes(n) + Board::bytes(n));
  const Board board(static_cast<char*>(memory->root()) + ShmRank::bells_bytes(n), n);
  std::vector<int> members(static_cast<size_t>(n));
  std::iota(members.begin(), members.end(), 0);
  std::vector<Communicator> ends;
  for (int rank = world->first_here(); rank < world->first_here() + world->num_here(); ++rank) {
    const auto end = std::make_shared<ShmRank>(world, memory, rank);
    ends.emplace_back(
        std::make_shared<ShmBackend>(end, end->add_group("world", members, rank, board)));
  }
  return ends;
}

}  // namespace

BackendFactory shm_backend() { return {.name = "shm", .connect = connect}; }

}  // namespace yoke::comm
