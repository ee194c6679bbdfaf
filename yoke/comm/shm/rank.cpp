// SPDX-License-Identifier: Apache-2.0
// How a rank of the shm backend waits: a brief spin on its bell, then sleep; never past the
// deadline, never for a rank that has left, and at once out when the world has failed.
#include "yoke/comm/shm/rank.h"

#include <algorithm>

#include "yoke/comm/linger.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

// After a failure elsewhere the bell may be rung by nobody: the side channel's news come by it.
constexpr Duration kNap = 100ms;

}  // namespace

ShmRank::ShmRank(std::shared_ptr<World> world, std::shared_ptr<SharedMemory> memory, int rank)
    : world_(std::move(world)), memory_(std::move(memory)), rank_(rank) {
  wake_token_ = world_->on_change([memory = memory_, mine = &bell(rank_)] { mine->notify_all(); });
}

EventCount& ShmRank::bell(int rank) const {
  return *reinterpret_cast<EventCount*>(static_cast<char*>(memory_->root()) + size_t(rank) * 64);
}

std::shared_ptr<ShmGroup> ShmRank::add_group(const std::string& name, std::vector<int> members,
                                             int rank, Board board) {
  std::erase_if(boards_, [&](const auto& kept) {
    const bool unused = kept.first.users().load() == 0;
    if (unused) memory_->free(kept.second);
    return unused;
  });
  groups_.push_back(std::make_shared<ShmGroup>(*this, name, std::move(members), rank, board));
  return groups_.back();
}

void ShmRank::keep(Board board, void* memory) { boards_.emplace_back(board, memory); }

bool ShmRank::progress(bool steal) {
  bool moved = false;
  // By index: a step may not add groups, but handles may be the last of theirs.
  for (size_t i = 0; i < groups_.size(); ++i) moved |= groups_[i]->progress(steal);
  std::erase_if(groups_, [](const auto& group) { return group.use_count() == 1 && group->idle(); });
  return moved;
}

void ShmRank::wait(const ShmGroup& group, const ShmPending& pending) {
  const bool crowded = more_than_cores(world_->size());
  const Time deadline = SteadyClock().now() + world_->timeout();
  EventCount& mine = bell(rank_);
  while (!pending.done) {
    const uint32_t seen = mine.key();
    if (progress(/*steal=*/true) || pending.done) continue;
    if (world_->failed()) world_->raise(rank_);
    if (linger(crowded, [&] { return mine.key() != seen; })) continue;
    check_missing(group, pending);
    const Time now = SteadyClock().now();
    if (now >= deadline) {
      world_->fail(
          rank_, Kind::Timeout,
          cat("rank ", rank_, " waited ",
              world_->lateness(group.text(pending), group.members(), group.missing_in(pending))));
      world_->raise(rank_);
    }
    mine.wait(seen, std::min(deadline, now + kNap));
  }
}

void ShmRank::check_missing(const ShmGroup& group, const ShmPending& pending) const {
  const auto reason = world_->in_vain(rank_, group.text(pending), group.members(),
                                      [&] { return group.missing_in(pending); });
  if (!reason) return;
  world_->fail(rank_, Kind::Comm, *reason);
  world_->raise(rank_);
}

void ShmRank::leave() {
  const Time deadline = SteadyClock().now() + world_->timeout();
  EventCount& mine = bell(rank_);
  while (!world_->failed() && SteadyClock().now() < deadline) {
    const uint32_t seen = mine.key();
    if (progress(/*steal=*/true)) continue;
    for (const auto& group : groups_) group->drop_what_waits_for_the_departed();
    if (std::ranges::all_of(groups_, [](const auto& group) { return group->idle(); })) return;
    mine.wait(seen, std::min(deadline, SteadyClock().now() + kNap));
  }
}

}  // namespace yoke::comm
