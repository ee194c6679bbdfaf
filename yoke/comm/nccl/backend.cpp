// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/nccl/backend.h"

#include <algorithm>

#include "yoke/comm/nccl/rank.h"

namespace yoke::comm {
namespace {

class NcclWork final : public Work::Impl {
 public:
  NcclWork(std::shared_ptr<NcclRank> rank, std::shared_ptr<NcclPending> pending)
      : rank_(std::move(rank)), pending_(std::move(pending)) {}

  void wait() override {
    pending_->host_waits ? rank_->synchronize(*pending_) : rank_->wait(*pending_);
  }
  void synchronize() override { rank_->synchronize(*pending_); }
  bool done() const override { return rank_->done(*pending_); }

 private:
  const std::shared_ptr<NcclRank> rank_;
  const std::shared_ptr<NcclPending> pending_;
};

class NcclBackend final : public Backend {
 public:
  NcclBackend(std::shared_ptr<NcclRank> rank, NcclGroup& group)
      : rank_(std::move(rank)), group_(group) {}

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  const std::string& name() const override { return group_.name; }

  Work issue(Operation operation) override {
    std::vector<Operation> one;
    one.push_back(std::move(operation));
    return issue_group(std::move(one));
  }

  Work issue_group(std::vector<Operation> messages) override {
    if (messages.empty()) return Work();
    return Work(std::make_shared<NcclWork>(rank_, rank_->issue(group_, std::move(messages))));
  }

  std::shared_ptr<Backend> split(int color, int key) override {
    const auto pending =
        rank_->issue(group_, {{.kind = OpKind::Split, .color = color, .key = key}});
    rank_->await_launch(*pending);
    return pending->formed ? std::make_shared<NcclBackend>(rank_, *pending->formed) : nullptr;
  }

  void abort(const std::string& reason) override {
    rank_->world().fail(-1, Kind::Comm, cat("aborted by rank ", rank_->world_rank(), ": ", reason));
  }

  void leave() override {}  // the issuing thread goes on without the rank

  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return rank_->allocate(sizes, options);
  }

  Capabilities capabilities() const override {
    return {.backend = "nccl",
            .cpu = false,
            .cuda = true,
            .checks_before_data_moves = rank_->world().options().check,
            .sums_in_rank_order = false,
            .abort_wakes_peers = true,
            .messages_overtake = false};
  }

 private:
  const std::shared_ptr<NcclRank> rank_;
  NcclGroup& group_;  // the rank's
};

std::vector<Communicator> connect(const std::shared_ptr<World>& world,
                                  const std::vector<topo::Device>& devices,
                                  const NcclOptions& options) {
  if (int(devices.size()) != world->num_here() ||
      !std::ranges::all_of(devices, [](const auto& d) { return d.kind == topo::DeviceKind::Cuda; }))
    fail(Kind::Usage, "the nccl backend needs a CUDA device for each of this process's ",
         world->num_here(), " ranks, got '", topo::to_text(devices),
         "'; give devices such as cuda:0-3, or choose local, shm or mpi");
  NcclApi api = open_nccl(options.file);
  auto sorted = devices;
  std::ranges::sort(sorted);
  if (api.version < 23000 && std::ranges::adjacent_find(sorted) != sorted.end())
    fail(Kind::Device, "several ranks on one GPU need NCCL 2.30 or newer; ", api.file, " is ",
         api.version_text(),
         "; pip install nvidia-nccl-cu13 and name its libnccl.so.2 in run.nccl");
  const auto process = std::make_shared<NcclProcess>(world, std::move(api), devices);
  std::vector<std::shared_ptr<NcclRank>> ranks;  // all must have started before one is awaited
  for (const auto& device : devices)
    ranks.push_back(
        std::make_shared<NcclRank>(process, world->first_here() + int(ranks.size()), device.index));
  std::vector<Communicator> ends;
  for (const auto& rank : ranks)
    ends.emplace_back(std::make_shared<NcclBackend>(rank, rank->await_world()));
  return ends;
}

}  // namespace

BackendFactory nccl_backend(NcclOptions options) {
  return {.name = "nccl", .connect = [options](const auto& world, const auto& devices) {
            return connect(world, devices, options);
          }};
}

}  // namespace yoke::comm
