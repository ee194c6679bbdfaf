// SPDX-License-Identifier: Apache-2.0
// Point to point inside a LocalGroup: the n-th send of one rank to another meets the n-th recv
// there.
#include "yoke/comm/local/group.h"

namespace yoke::comm {

std::shared_ptr<Message> LocalGroup::post_message(int rank, Operation part) {
  const bool sends = part.kind == OpKind::Send;
  const int peer = part.root;
  const bool on_cuda = part.subject().is_cuda();
  auto mine = std::make_shared<Message>(std::move(part));
  mine->kind = mine->part.kind;
  mine->rank = rank;
  mine->peer = world_rank(peer);
  mine->missing = {world_rank(peer)};
  mine->on_cuda = on_cuda;
  if (on_cuda) mine->mark = cuda_mark(mine->part.subject().device());
  std::shared_ptr<Message> other;
  std::string conflict;
  {
    MutexLock lock(mutex_);
    collect();
    Channel& channel = channels_[sends ? std::pair(rank, peer) : std::pair(peer, rank)];
    const uint64_t sequence = sends ? channel.num_sends++ : channel.num_recvs++;
    mine->sequence = sequence;
    mine->ticket = world_->flights().post(world_rank(rank), {.kind = to_string(mine->part.kind),
                                                             .group = id_,
                                                             .sequence = sequence,
                                                             .bytes = mine->part.bytes(),
                                                             .peer = peer,
                                                             .message = true});
    if (on_cuda) {
      if (!channel.lane) channel.lane = std::make_unique<CudaLane>();
      mine->lane = channel.lane.get();
      mine->lane_number = uint32_t(sequence + 1);
      watch(mine);
    }
    auto& partners = sends ? channel.recvs : channel.sends;
    if (partners.empty()) {
      (sends ? channel.sends : channel.recvs).push_back(mine);
    } else {
      other = std::move(partners.front());
      partners.pop_front();
      const at::Tensor &a = mine->part.subject(), &b = other->part.subject();
      auto reason = message_mismatch(a.scalar_type(), a.numel(), b.scalar_type(), b.numel());
      if (a.device().type() != b.device().type()) reason = "the devices differ";
      if (reason)
        conflict = disagreement(*reason, {world_rank(rank), mine->part.text()},
                                {world_rank(peer), other->part.text()}, sequence, name_,
                                /*message=*/true);
      for (const auto& side : {mine, other}) {
        side->missing.clear();
        if (conflict.empty()) side->stage.store(Pending::Stage::Settled, std::memory_order_release);
      }
      // Under the lock, because a lane takes its operations in order; it only enqueues.
      if (on_cuda && conflict.empty())
        deliver(rank, sends ? *mine : *other, sends ? *other : *mine);
    }
  }
  if (!conflict.empty()) call_off(rank, Kind::Comm, conflict);
  if (other && !on_cuda) deliver(rank, sends ? *mine : *other, sends ? *other : *mine);
  if (other) changed_.notify_all();
  return mine;
}

void LocalGroup::deliver(int rank, Message& send, Message& recv) {
  carry_out(rank, {&send, &recv}, [&] {
    const std::vector<Job> jobs{{{send.part.inputs[0]}, {recv.part.outputs[0]}}};
    if (send.on_cuda) {
      send.launched =
          send.lane->launch(send.lane_number, {send.part, recv.part}, {send.mark, recv.mark}, jobs);
      recv.launched = send.launched;
      return;
    }
    run_copies(send.part.before);
    const CpuItems items(jobs, send.part);
    for (int64_t item = 0; item < items.size(); ++item) items.run(item);
    run_copies(recv.part.after);
  });
  for (Message* side : {&send, &recv}) {
    if (!side->on_cuda) side->drop_tensors();
    world_->flights().finish(world_rank(side->rank), side->ticket);
    side->stage.store(Pending::Stage::Done, std::memory_order_release);
  }
}

}  // namespace yoke::comm
